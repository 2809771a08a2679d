"""The work of one training batch of a model, phase by phase: operations, and bytes that no cache can save.

This counts what any implementation has to do, not what this one does: only the interaction's products of
distinct pairs, and one read of an embedding row that a batch looks up many times. Only matrix products count
as operations. The floor is thus a lower bound as long as tables and activations exceed the caches; rows that
stay in a cache from one batch to the next can be read faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from recpipe.model.config import ModelConfig
from recpipe.plugin.bags import Bags
from recpipe.plugin.tables import TableSet

FLOAT_BYTES = 4


@dataclass(frozen=True)
class Work:
    """The work of one phase for one batch."""

    flops: float = 0.0
    """Operations of matrix products; an addition and a multiplication count as two."""
    streamed_bytes: float = 0.0
    """Bytes read and written sequentially."""
    gathered_bytes: float = 0.0
    """Bytes of table rows, read and written at random."""


@dataclass(frozen=True)
class Lookups:
    """Means over batches: ``samples``, ids looked up, and distinct (table, row) among them."""

    samples: float
    lookups: float
    distinct_rows: float

    def __add__(self, other: Lookups) -> Lookups:
        """The lookups of the same batches in the tables of both."""
        return Lookups(self.samples, self.lookups + other.lookups, self.distinct_rows + other.distinct_rows)


def count_lookups(batches: Sequence[Bags]) -> Lookups:
    """Count real batches' lookups in one group of tables."""
    count = len(batches)
    return Lookups(
        sum(bags.batch_size for bags in batches) / count,
        sum(len(bags.indices) for bags in batches) / count,
        sum(len(np.unique(bags.indices)) for bags in batches) / count,
    )


def embedding_work(groups: Sequence[tuple[TableSet, Lookups]]) -> dict[str, Work]:
    """The work of the lookups in all groups of tables: rows are read, handed out and, unless they are frozen,
    updated by their gradients."""
    handed_out = given_back = read = updated = 0.0
    for tables, lookups in groups:
        rows = lookups.samples * len(tables.features) if tables.pooled else lookups.lookups
        handed_out += FLOAT_BYTES * rows * tables.dim
        read += FLOAT_BYTES * lookups.distinct_rows * tables.dim
        if not tables.optimizer.frozen:
            given_back += FLOAT_BYTES * rows * tables.dim
            updated += 2 * lookups.distinct_rows * tables.record_bytes
    return {
        "embedding forward": Work(streamed_bytes=handed_out, gathered_bytes=read),
        "embedding backward and update": Work(streamed_bytes=given_back, gathered_bytes=updated),
    }


def dense_work(
    model: ModelConfig, dense_features: int, sparse_features: int, samples: float
) -> dict[str, Work]:
    """The MLPs' and the interaction's work in recpipe's own models, forward and backward, for ``samples``.

    A layer's backward pass has two products of its forward's size, one for the weights' gradient and one for
    the input's; the bottom MLP's first layer needs only the former. Without dense features the bottom MLP
    runs once per batch, for a constant. Activations have two bytes under ``model.precision=bfloat16``.
    """
    width, dim, vectors = (
        (2 if model.precision == "bfloat16" else 4),
        model.embedding_dim,
        sparse_features + 1,
    )
    inputs, runs = (dense_features, samples) if dense_features else (1, 1.0)
    bottom = list(pairwise([inputs, *model.bottom, dim]))
    if model.name == "dlrm":
        pairs = vectors * (vectors - 1) // 2
        products, saved = pairs * dim, vectors * dim
        interaction_parameters, top_input = 0, dim + pairs
    else:
        # x * (W (V x) + b) + x for each layer, W and V of rank model.cross_rank: DCN V2, low rank.
        products = model.cross_layers * 2 * vectors * dim * model.cross_rank
        saved = vectors * dim * model.cross_layers
        interaction_parameters, top_input = products, vectors * dim
    top = list(pairwise([top_input, *model.top, 1]))
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
    """The work of one step: parameters and each tensor of state are read and written, gradients are read.

    The optimizer's state must be that after a first step.
    """
    parameters = _bytes(p for group in optimizer.param_groups for p in group["params"])
    state = _bytes(t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor))
    return Work(streamed_bytes=3 * parameters + 2 * state)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
