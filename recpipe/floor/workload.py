"""What one training batch of a model must do, phase by phase: operations, and bytes that no cache can save.

Counted is what any implementation has to do, not what this one does: of the interaction's products those
of distinct pairs, of an embedding row that a batch looks up many times one read. Matrix products alone count
as operations. So the floor is a lower bound, as long as tables and activations exceed the caches; rows
that stay in a cache from one batch to the next can be had faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.embedding.tables import TableSet
from recpipe.model.config import ModelConfig

FLOAT_BYTES = 4


@dataclass(frozen=True)
class Work:
    """What one phase must do for one batch."""

    flops: float = 0.0
    """Of matrix products; an addition and a multiplication are two."""
    streamed_bytes: float = 0.0
    """Read and written one after the other."""
    gathered_bytes: float = 0.0
    """Of table rows, read and written at random."""


@dataclass(frozen=True)
class Lookups:
    """Means over batches: ``samples``, ids looked up, and distinct (table, row) among them."""

    samples: float
    lookups: float
    distinct_rows: float


def count_lookups(batches: Sequence[KeyedJaggedTensor]) -> Lookups:
    """Count real batches, each feature with a table of its own."""
    samples = lookups = distinct = 0
    for batch in batches:
        ends = batch.offset_per_key()
        samples += batch.stride()
        lookups += batch.values().numel()
        distinct += sum(len(torch.unique(batch.values()[low:high])) for low, high in pairwise(ends))
    count = len(batches)
    return Lookups(samples / count, lookups / count, distinct / count)


def workload(
    model: ModelConfig, dense_features: int, tables: TableSet, lookups: Lookups, optimizer: Work
) -> dict[str, Work]:
    """The phases' work for a batch; ``optimizer`` is the dense part's, of ``optimizer_work``.

    Reading the batch counts nothing: a thread does it while the batch before trains.
    """
    features = len(tables.features)
    pooled_bytes = FLOAT_BYTES * lookups.samples * features * tables.dim
    rows = lookups.distinct_rows
    return {
        "input": Work(),
        "embedding forward": Work(
            streamed_bytes=pooled_bytes, gathered_bytes=rows * FLOAT_BYTES * tables.dim
        ),
        **dense_work(model, dense_features, features, lookups.samples),
        "embedding backward and update": Work(
            streamed_bytes=pooled_bytes, gathered_bytes=2 * rows * tables.record_bytes
        ),
        "dense optimizer": optimizer,
    }


def dense_work(
    model: ModelConfig, dense_features: int, sparse_features: int, samples: float
) -> dict[str, Work]:
    """The MLPs' and the interaction's work, forward and backward, for ``samples`` samples.

    A layer's backward pass has two products of its forward's size, one for the weights' gradient and one
    for the input's; the bottom MLP's first layer needs none of the latter. Without dense features the bottom
    MLP runs for a constant, once a batch. Activations have two bytes under ``model.precision=bfloat16``.
    """
    width, dim, vectors = (
        (2 if model.precision == "bfloat16" else 4),
        model.embedding_dim,
        sparse_features + 1,
    )
    inputs, runs = (dense_features, samples) if dense_features else (1, 1.0)
    bottom = _layers([inputs, *model.bottom, dim])
    if model.name == "dlrm":
        pairs = vectors * (vectors - 1) // 2
        products, saved = pairs * dim, vectors * dim
        interaction_parameters, top_input = 0, dim + pairs
    else:
        # x * (W (V x) + b) + x for each layer, W and V of rank model.cross_rank: DCN V2, low rank.
        products = model.cross_layers * 2 * vectors * dim * model.cross_rank
        saved = vectors * dim * model.cross_layers
        interaction_parameters, top_input = products, vectors * dim
    top = _layers([top_input, *model.top, 1])
    weights = FLOAT_BYTES * sum(i * o for i, o in [*bottom, *top])
    flops = 2 * sum(n * i * o for n, layers in ((runs, bottom), (samples, top)) for i, o in layers)
    values = runs * (inputs + sum(o for _, o in bottom)) + samples * (sum(o for _, o in top) + top_input)
    unneeded = 2 * runs * inputs * bottom[0][1]
    cross_weights = FLOAT_BYTES * interaction_parameters
    moved = width * samples * (saved + top_input)
    return {
        "interaction forward": Work(2 * samples * products, moved + cross_weights),
        "MLP forward": Work(flops, weights + width * values),
        "MLP backward": Work(2 * flops - unneeded, 2 * weights + width * values),
        "interaction backward": Work(
            4 * samples * products, moved + width * samples * vectors * dim + 2 * cross_weights
        ),
    }


def optimizer_work(optimizer: torch.optim.Optimizer) -> Work:
    """One step: parameters read and written, gradients read, each tensor of state read and written.

    As its state is after a first step.
    """
    parameters = _bytes(p for group in optimizer.param_groups for p in group["params"])
    state = _bytes(t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor))
    return Work(streamed_bytes=3 * parameters + 2 * state)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _layers(sizes: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise(sizes))
