"""TorchRec's sharded modules: their parts here, what sharders are given, lookups of recpipe's own in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    DenseTableBatchedEmbeddingBagsCodegen,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from numpy.typing import NDArray
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.batched_embedding_kernel import BatchedFusedEmbedding, BatchedFusedEmbeddingBag
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_lookup import GroupedEmbeddingsLookup, GroupedPooledEmbeddingsLookup
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.common.versions import private
from recpipe.seams.tables import module_name

_FUSED = (BatchedFusedEmbedding, BatchedFusedEmbeddingBag)


@dataclass(frozen=True)
class LocalShard:
    """A table's rows from ``row`` and columns from ``column`` on that lie on this process."""

    row: int
    column: int
    weights: torch.Tensor
    """float32 [rows, columns], sharing the TBE's memory."""
    state: torch.Tensor
    """Optimizer state float32 [rows, S], likewise."""

    @property
    def shape(self) -> tuple[int, int]:
        """Its rows and columns."""
        return len(self.weights), self.weights.shape[1]

    def read(self, low: int, high: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Weights and optimizer state of its rows [low, high); may share their memory."""
        weights, state = (t[low:high].detach().to("cpu", torch.float32) for t in (self.weights, self.state))
        return weights.numpy(), state.numpy()

    def write(self, low: int, high: int, values: tuple[NDArray[np.float32], NDArray[np.float32]]) -> None:
        """Replace them."""
        with torch.no_grad():
            for tensor, value in zip((self.weights, self.state), values, strict=True):
                if tensor.numel():
                    tensor[low:high].copy_(torch.from_numpy(value))


def local_shards(sharded: Any, table: str, under: str) -> list[LocalShard]:
    """The shards of ``table`` in a sharded module of TorchRec's, which has its tables in its child ``under``.

    A data-parallel table is one shard without state: its optimizer is not TorchRec's.
    """
    key = f"{under}.{module_name(table)}.weight"
    weight = sharded.state_dict()[key]
    if not hasattr(weight, "local_shards"):
        return [LocalShard(0, 0, weight.detach(), weight.new_empty(len(weight), 0))]
    weights = weight.local_shards()
    states = sharded.fused_optimizer.state_dict()["state"].get(key, {})
    momentum = next((v.local_shards() for name, v in states.items() if "momentum" in name), None)
    shards = []
    for index, shard in enumerate(weights):
        tensor = shard.tensor.detach()
        state = tensor.new_empty(len(tensor), 0)
        if momentum is not None:
            flat = momentum[index].tensor.detach()
            state = flat.view(len(tensor), flat.numel() // max(1, len(tensor)))
        row, column = shard.metadata.shard_offsets
        shards.append(LocalShard(row, column, tensor, state))
    return shards


def fuse(weight: torch.nn.Parameter, fused: Mapping[str, Any]) -> None:
    """Let a sharder give this table, still without memory, the fused parameters ``fused``.

    TorchRec's ``apply_optimizer_in_backward`` notes them in the same place, and makes an optimizer of torch's
    for each table besides, which nothing would use.
    """
    weight._optimizer_kwargs = [dict(fused)]  # type: ignore[attr-defined]


def equipped(sharder: Any, fused: Mapping[str, Any], codecs: Mapping[str, Any]) -> Any:
    """A copy of an embedding ``sharder`` with what it leaves open of its fused parameters and codecs."""
    made = copy(sharder)
    for name in ("_fused_params", "_qcomm_codecs_registry"):
        private(made, name)
    made._fused_params = {**fused, **(sharder.fused_params or {})}
    made._qcomm_codecs_registry = {**codecs, **(sharder.qcomm_codecs_registry or {})}
    return made


def replicated_lookups(sharded: Any) -> list[DistributedDataParallel]:
    """Data-parallel tables' lookups in a sharded module: of them all, in one module, or none."""
    return [m for m in private(sharded, "_lookups") if isinstance(m, DistributedDataParallel)]


@dataclass(frozen=True)
class FusedLookup:
    """A TBE with a fused optimizer in a sharded module."""

    tbe: SplitTableBatchedEmbeddingBagsCodegen
    features: tuple[tuple[str, int], ...]
    """Of each of its features the table, by its ``module_name``, and the first of that table's rows here."""


def fused_lookups(sharded: Any) -> list[FusedLookup]:
    """All of them in a sharded module, on this rank."""
    lookups = private(sharded, "_lookups")
    kernels = [m for lookup in lookups for m in lookup.modules() if isinstance(m, _FUSED)]
    found = []
    for kernel in kernels:
        features: list[tuple[str, int]] = []
        for table in kernel.config.embedding_tables:
            place = table.local_metadata
            features += [(table.name, place.shard_offsets[0] if place else 0)] * table.num_features()
        found.append(FusedLookup(kernel.emb_module, tuple(features)))
    return found


OWN_KERNEL = EmbeddingComputeKernel.CUSTOMIZED_KERNEL.value
"""The kernel, in TorchRec's plans, of tables for which it makes no memory inside ``own_lookups``."""


@dataclass(frozen=True)
class LocalPart:
    """Rows and columns of a table that are looked up on this process."""

    table: str
    """By its ``module_name``."""
    row: int
    column: int
    rows: int
    columns: int
    features: int
    """How many features look them up, one after the other in what the lookup is given."""


def _local_part(table: Any) -> LocalPart:
    row, column = table.local_metadata.shard_offsets
    return LocalPart(table.name, row, column, table.local_rows, table.local_cols, table.num_features())


class OwnLookup(nn.Module):
    """A place in a sharded module for a lookup of ours: TorchRec brings it ids and takes its rows away."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.parts = [_local_part(t) for t in config.embedding_tables]
        self.look_up: Callable[[KeyedJaggedTensor], torch.Tensor] | None = None
        """Rows of ids that count from each part's first row, features in the order of ``parts``: float32
        [B, their columns], or where rows are not pooled one for each id."""

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Look the rows up; the backward pass is their update."""
        assert self.look_up is not None, "given once TorchRec has made the sharded module"
        return self.look_up(features)

    def state_dict(self, *_: Any, **__: Any) -> Any:
        """Nothing that TorchRec should know."""
        return {}

    def flush(self) -> None:
        """TorchRec asks before it reads weights, of which it has none here."""

    def named_parameters_by_table(self) -> Iterator[tuple[str, nn.Parameter]]:
        """None: the rows are no parameters of TorchRec's."""
        return iter(())


@contextmanager
def own_lookups() -> Iterator[None]:
    """Inside, TorchRec makes an ``OwnLookup`` for tables of ``OWN_KERNEL``, a kernel that it only names.

    Nor does it give first values to tables of a module that has such a table: it would miss their weights.
    """

    def kernel(before: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        def make(lookup: nn.Module, config: Any, *arguments: Any, **named: Any) -> nn.Module:
            own = config.compute_kernel.value == OWN_KERNEL
            return OwnLookup(config) if own else before(lookup, config, *arguments, **named)

        return make

    def values(before: Callable[..., None]) -> Callable[..., None]:
        def reset(sharded: Any) -> None:
            if all(table.compute_kernel != OWN_KERNEL for table in sharded.module_sharding_plan.values()):
                before(sharded)

        return reset

    kept = []
    try:
        for name, around, kinds in (
            ("_create_embedding_kernel", kernel, (GroupedPooledEmbeddingsLookup, GroupedEmbeddingsLookup)),
            ("reset_parameters", values, (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)),
        ):
            for kind in kinds:
                before = private(kind, name)
                kept.append((kind, name, before))
                setattr(kind, name, around(before))
        yield
    finally:
        for kind, name, before in kept:
            setattr(kind, name, before)


def own_lookups_in(sharded: Any) -> list[OwnLookup]:
    """All of them in a sharded module, on this process."""
    lookups = private(sharded, "_lookups")
    return [m for lookup in lookups for m in lookup.modules() if isinstance(m, OwnLookup)]


def given_to_own(sharded: Any, arrived: Any) -> Iterator[tuple[OwnLookup, KeyedJaggedTensor]]:
    """Each ``OwnLookup`` of a sharded module, with what it will be given of ids that have ``arrived``.

    TorchRec's own ``prefetch`` passes them over.
    """
    for lookup, features in zip(sharded._lookups, arrived, strict=True):
        modules = getattr(lookup, "_emb_modules", ())  # none of data-parallel tables
        if any(isinstance(module, OwnLookup) for module in modules):
            pairs = zip(modules, features.split(lookup._feature_splits), strict=True)
            yield from ((module, part) for module, part in pairs if isinstance(module, OwnLookup))


def look_up_each_id(lookup: nn.Module) -> None:
    """Let data-parallel tables of a sequence give one row for each id on a CPU, where FBGEMM's dense kernel
    passes over its ``PoolingMode.NONE`` and adds the rows of a bag up."""
    for module in lookup.modules():
        if isinstance(module, DenseTableBatchedEmbeddingBagsCodegen):
            module.forward = partial(_each_id, module)


def _each_id(
    tables: DenseTableBatchedEmbeddingBagsCodegen, indices: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Rows float32 [L, D] of tables of one dimension, which lie one after the other in ``tables.weights``."""
    firsts = tables.weights_offsets // tables.max_D
    samples = (len(offsets) - 1) // len(firsts)
    counts = offsets[torch.arange(len(firsts) + 1, device=offsets.device) * samples].diff()
    rows = indices + torch.repeat_interleave(firsts, counts)
    return torch.nn.functional.embedding(rows, tables.weights.view(-1, tables.max_D))
