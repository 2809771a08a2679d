"""TorchRec's sharded modules: their parts on this process, sharders' settings, and recpipe's own lookups in
them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
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
from recpipe.private_api.tables import module_name

_FUSED = (BatchedFusedEmbedding, BatchedFusedEmbeddingBag)


@dataclass(frozen=True)
class LocalShard:
    """The part of a table that is on this process; it begins at ``row`` and ``column`` of the table."""

    row: int
    column: int
    weights: torch.Tensor
    """float32 [rows, columns], sharing the TBE's memory."""
    state: torch.Tensor
    """Optimizer state float32 [rows, S], sharing the TBE's memory."""

    @property
    def shape(self) -> tuple[int, int]:
        """The number of its rows and of its columns."""
        return len(self.weights), self.weights.shape[1]

    def read(self, low: int, high: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Weights and optimizer state of its rows [low, high); they may share the TBE's memory."""
        weights, state = (t[low:high].detach().to("cpu", torch.float32) for t in (self.weights, self.state))
        return weights.numpy(), state.numpy()

    def write(self, low: int, high: int, values: tuple[NDArray[np.float32], NDArray[np.float32]]) -> None:
        """Replace weights and optimizer state of its rows [low, high)."""
        with torch.no_grad():
            for tensor, value in zip((self.weights, self.state), values, strict=True):
                if tensor.numel():
                    tensor[low:high].copy_(torch.from_numpy(value))

    def weights_of(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """A copy of the weights of its distinct ``rows``, float32 [n, columns]."""
        at = torch.from_numpy(rows).to(self.weights.device)
        found: NDArray[np.float32] = self.weights.detach()[at].to("cpu", torch.float32).numpy()
        return found

    def replace(self, rows: NDArray[np.int64], weights: torch.Tensor, state: torch.Tensor) -> None:
        """Replace weights and optimizer state of its distinct ``rows``."""
        at = torch.from_numpy(rows).to(self.weights.device)
        with torch.no_grad():
            for tensor, value in ((self.weights, weights), (self.state, state)):
                if tensor.numel():
                    tensor[at] = value.to(tensor.device, tensor.dtype)


def local_shards(sharded: Any, table: str, under: str) -> list[LocalShard]:
    """This process's shards of ``table`` in a sharded TorchRec module that has its tables in its child
    ``under``.

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
    """Make a sharder give this table, which has no memory yet, the fused parameters ``fused``.

    TorchRec's ``apply_optimizer_in_backward`` stores them in the same place, but also makes a torch optimizer
    for each table, which nothing would use.
    """
    weight._optimizer_kwargs = [dict(fused)]  # type: ignore[attr-defined]


def replicated_lookups(sharded: Any) -> list[DistributedDataParallel]:
    """The lookups of data-parallel tables in a sharded module: one module for all such tables, or none."""
    return [m for m in private(sharded, "_lookups") if isinstance(m, DistributedDataParallel)]


@dataclass(frozen=True)
class FusedLookup:
    """A TBE with a fused optimizer in a sharded module."""

    tbe: SplitTableBatchedEmbeddingBagsCodegen
    features: tuple[tuple[str, int], ...]
    """For each of its features, the table's ``module_name`` and the first of that table's rows here."""


def fused_lookups(sharded: Any) -> list[FusedLookup]:
    """All fused lookups of a sharded module on this rank."""
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


Fetched = list[tuple[SplitTableBatchedEmbeddingBagsCodegen, list[torch.Tensor], list[int]]]
"""For each TBE behind a cache of a GPU, where the rows of one batch are in that cache."""


def taken(lookups: Iterable[FusedLookup]) -> Fetched:
    """Take out of ``lookups`` the places that a prefetch has just noted in them for a later lookup.

    A TBE gives what was fetched first to the lookup that comes first, whatever ids this has. But an
    evaluation, or the first batch after an epoch that was left early, comes before the batch whose rows were
    fetched.
    """
    found: Fetched = []
    for tbe in (lookup.tbe for lookup in lookups):
        found.append((tbe, tbe.lxu_cache_locations_list, tbe.timesteps_prefetched))
        tbe.lxu_cache_locations_list, tbe.timesteps_prefetched = [], []
    return found


def give_back(fetched: Fetched) -> None:
    """Before a batch's lookup: note in its TBEs what ``taken`` took for it."""
    for tbe, locations, steps in fetched:
        tbe.lxu_cache_locations_list, tbe.timesteps_prefetched = locations, steps


def unlock(fetched: Fetched) -> None:
    """Unlock the rows in ``fetched``, which stay in the cache: their batch will not be trained, and otherwise
    its backward pass would unlock them."""
    for tbe, locations, _ in fetched:
        for places in locations:
            _unlock(tbe, places)


@contextmanager
def unlocking(lookups: Iterable[FusedLookup]) -> Iterator[None]:
    """In the block, what lookups lock in a GPU's cache is unlocked again: the backward pass would do that,
    and an evaluation has none.

    They must lock: a lookup that does not may also take the places of rows that others have locked, such as
    those of the next batch to train.
    """
    tbes = [lookup.tbe for lookup in lookups]
    before = [tbe.lxu_cache_locations for tbe in tbes]
    for tbe in tbes:
        tbe.lxu_cache_locations = tbe.lxu_cache_locations_empty
    try:
        yield
    finally:
        for tbe, places in zip(tbes, before, strict=True):
            _unlock(tbe, tbe.lxu_cache_locations)
            tbe.lxu_cache_locations = places


def _unlock(tbe: SplitTableBatchedEmbeddingBagsCodegen, places: torch.Tensor) -> None:
    """Unlock each of ``places`` in a TBE's cache once, however often it is among them, as its backward pass
    does."""
    if len(places):
        torch.ops.fbgemm.lxu_cache_locking_counter_decrement(tbe.lxu_cache_locking_counter, places)


OWN_KERNEL = EmbeddingComputeKernel.CUSTOMIZED_KERNEL.value
"""The kernel in TorchRec's plans that marks tables for which it makes no memory inside ``own_lookups``."""


@dataclass(frozen=True)
class LocalPart:
    """The part of a table that is looked up on this process."""

    table: str
    """The table's ``module_name``."""
    row: int
    column: int
    rows: int
    columns: int
    features: int
    """How many features look it up; they follow each other in the lookup's input."""


class OwnLookup(nn.Module):
    """Takes the place of a lookup in a sharded module: TorchRec passes it ids and distributes the rows it
    returns."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.parts: list[LocalPart] = []
        for table in config.embedding_tables:
            row, column = table.local_metadata.shard_offsets
            shape = table.local_rows, table.local_cols
            self.parts.append(LocalPart(table.name, row, column, *shape, table.num_features()))
        self.look_up: Callable[[KeyedJaggedTensor], torch.Tensor] | None = None
        """Looks ids up, which count from each part's first row, with features in the order of ``parts``.
        Returns float32 [B, total columns], or one row for each id if rows are not pooled."""

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Look the rows up; the backward pass is their update."""
        assert self.look_up is not None, "given once TorchRec has made the sharded module"
        return self.look_up(features)

    def state_dict(self, *_: Any, **__: Any) -> Any:
        """Empty: TorchRec need not know the rows."""
        return {}

    def flush(self) -> None:
        """Do nothing: TorchRec calls this before it reads weights, and it has none here."""

    def named_parameters_by_table(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Empty: the rows are not TorchRec's parameters."""
        return iter(())


@contextmanager
def own_lookups() -> Iterator[None]:
    """In the block, TorchRec makes an ``OwnLookup`` for tables of ``OWN_KERNEL``, a kernel name without
    implementation.

    It does not initialize the tables of a module that has such a table, since it would not find their
    weights.
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
    """All ``OwnLookup``s of a sharded module on this process."""
    lookups = private(sharded, "_lookups")
    return [m for lookup in lookups for m in lookup.modules() if isinstance(m, OwnLookup)]


def given_to_own(sharded: Any, arrived: Any) -> Iterator[tuple[OwnLookup, KeyedJaggedTensor]]:
    """Each ``OwnLookup`` of a sharded module, with what it will be given of ids that have ``arrived``.

    TorchRec's own ``prefetch`` passes them over.
    """
    for lookup, features in zip(private(sharded, "_lookups"), arrived, strict=True):
        modules = getattr(lookup, "_emb_modules", ())  # none of data-parallel tables
        if any(isinstance(module, OwnLookup) for module in modules):
            pairs = zip(modules, features.split(private(lookup, "_feature_splits")), strict=True)
            yield from ((module, part) for module, part in pairs if isinstance(module, OwnLookup))


def look_up_each_id(lookup: nn.Module) -> None:
    """Make data-parallel tables without pooling return one row for each id on a CPU. There FBGEMM's dense
    kernel ignores ``PoolingMode.NONE`` and sums the rows of a bag."""
    for module in lookup.modules():
        if isinstance(module, DenseTableBatchedEmbeddingBagsCodegen):
            module.forward = partial(_each_id, module)


def _each_id(
    tables: DenseTableBatchedEmbeddingBagsCodegen, indices: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Rows float32 [L, D] of tables of the same dimension, which follow each other in ``tables.weights``."""
    firsts = tables.weights_offsets // tables.max_D
    samples = (len(offsets) - 1) // len(firsts)
    counts = offsets[torch.arange(len(firsts) + 1, device=offsets.device) * samples].diff()
    rows = indices + torch.repeat_interleave(firsts, counts)
    return torch.nn.functional.embedding(rows, tables.weights.view(-1, tables.max_D))
