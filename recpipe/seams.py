"""The only file that touches private names of torch, TorchRec and FBGEMM; all else uses their public API.

Checked against the version triples that ``recpipe doctor`` knows. When a release renames one of
these, this file is the place to mend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cache, partial
from inspect import Signature, signature
from time import perf_counter
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
import torch.distributed
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    DenseTableBatchedEmbeddingBagsCodegen,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from numpy.typing import NDArray
from torch import nn
from torch._C._profiler import _ExperimentalConfig
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchrec.distributed import comm, comm_ops, dist_data
from torchrec.distributed.batched_embedding_kernel import BatchedFusedEmbedding, BatchedFusedEmbeddingBag
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_lookup import GroupedEmbeddingsLookup, GroupedPooledEmbeddingsLookup
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

_TAKEN = frozenset(dir(nn.ModuleDict()))
_FUSED = (BatchedFusedEmbedding, BatchedFusedEmbeddingBag)
__all__ = [
    "EnumerableShardingSpec",
    "Shard",
    "ShardMetadata",
    "ShardedTensor",
    "TorchDispatchMode",
    "init_from_local_shards",
    "tree_leaves",
]
"""Classes and functions of torch's as they are; what is recpipe's own stands below."""
Views = tuple[torch.Tensor, torch.Tensor]
"""A table's weights [rows, D], of the type that stores them, and optimizer state float32 [rows, S] (S may be
0), sharing the TBE's memory."""


def module_name(table: str) -> str:
    """``table`` as the name of a module, by which TorchRec's planner and sharded collection know a table.

    The name itself, but for what no module may be called: a dot, nothing, an attribute of ``ModuleDict``.
    Percent-encoded, so that different tables have different names.
    """
    safe = quote(table, safe="").replace(".", "%2E")
    if safe in _TAKEN:
        return f"%{ord(safe[0]):02X}{safe[1:]}"
    return safe or "%"


def tbe_views(tbe: SplitTableBatchedEmbeddingBagsCodegen) -> list[Views]:
    """Per physical table of a TBE, views of weights and optimizer state; writing them changes the TBE."""
    weights = tbe.split_embedding_weights()
    states = tbe.split_optimizer_states() or [()] * len(weights)
    views = []
    for weight, state in zip(weights, states, strict=True):
        rows = weight.shape[0]
        # The row-wise state is a vector, Adagrad's a matrix; SGD has none.
        flat = state[0].view(rows, -1) if len(state) else weight.new_empty((rows, 0), dtype=torch.float32)
        views.append((weight.detach(), flat.detach()))
    return views


def update_by_table(
    tbe: SplitTableBatchedEmbeddingBagsCodegen, rows: int, table_of: NDArray[np.int64]
) -> None:
    """Let a CPU TBE of one physical table with ``rows`` update it by the tables whose rows lie there.

    ``table_of``: each feature's table, int64 [F]. For a table that several features share, FBGEMM has a loop
    that is slower and rounds otherwise than its kernel for a table of one feature. No row here is looked up
    by features of two tables, so the latter is as right, and makes the bits that a physical table for each
    would. FBGEMM takes features for tables of their own where their first rows, in this sum, differ.
    """
    if tbe.hash_size_cumsum.device.type == "cpu":
        ends = np.append(table_of, table_of[-1] + 1)
        tbe.hash_size_cumsum.copy_(rows * torch.from_numpy(ends))


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
    made._fused_params = {**fused, **(sharder.fused_params or {})}
    made._qcomm_codecs_registry = {**codecs, **(sharder.qcomm_codecs_registry or {})}
    return made


def replicated_lookups(sharded: Any) -> list[DistributedDataParallel]:
    """Data-parallel tables' lookups in a sharded module: of them all, in one module, or none."""
    return [m for m in sharded._lookups if isinstance(m, DistributedDataParallel)]


@dataclass(frozen=True)
class FusedLookup:
    """A TBE with a fused optimizer in a sharded module."""

    tbe: SplitTableBatchedEmbeddingBagsCodegen
    features: tuple[tuple[str, int], ...]
    """Of each of its features the table, by its ``module_name``, and the first of that table's rows here."""


def fused_lookups(sharded: Any) -> list[FusedLookup]:
    """All of them in a sharded module, on this rank."""
    kernels = [m for lookup in sharded._lookups for m in lookup.modules() if isinstance(m, _FUSED)]
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
                before = getattr(kind, name)
                kept.append((kind, name, before))
                setattr(kind, name, around(before))
        yield
    finally:
        for kind, name, before in kept:
            setattr(kind, name, before)


def own_lookups_in(sharded: Any) -> list[OwnLookup]:
    """All of them in a sharded module, on this process."""
    return [m for lookup in sharded._lookups for m in lookup.modules() if isinstance(m, OwnLookup)]


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


@dataclass
class Collective:
    """Calls of one kind of collective by TorchRec on this rank."""

    calls: int = 0
    bytes_sent: int = 0
    """Payload for other ranks ..."""
    bytes_received: int = 0
    """... and from them."""
    wait_seconds: float = 0.0
    """Time that this rank's Python waited for their ends."""


class _Timed(torch.distributed.Work):
    """A ``Work`` that tells how long ``wait`` took; TorchRec looks at its type."""

    def __init__(self, work: Any, into: Collective) -> None:
        super().__init__()
        self._work, self._into = work, into

    def wait(self, *arguments: Any) -> Any:
        start = perf_counter()
        try:
            return self._work.wait(*arguments)
        finally:
            self._into.wait_seconds += perf_counter() - start

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@cache
def _signature(name: str) -> Signature:
    return signature(getattr(torch.distributed, name))


class _Counting:
    """``torch.distributed`` as TorchRec's modules see it, counting what goes over the wire."""

    def __init__(self, counts: dict[str, Collective]) -> None:
        self.counts = counts

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch.distributed, name)
        if name not in _PAYLOAD:
            return found

        def call(*arguments: Any, **named: Any) -> Any:
            entry = self.counts.setdefault(name, Collective())
            entry.calls += 1
            group = named.get("group")
            world = torch.distributed.get_world_size(group)
            given = _signature(name).bind(*arguments, **named).arguments
            sent, received = _PAYLOAD[name](world, torch.distributed.get_rank(group), given)
            entry.bytes_sent += sent
            entry.bytes_received += received
            start = perf_counter()
            work = found(*arguments, **named)
            if work is not None:
                return _Timed(work, entry)
            entry.wait_seconds += perf_counter() - start
            return None

        return call


def _all_to_all(world: int, rank: int, given: Mapping[str, Any]) -> tuple[int, int]:
    def outward(tensor: torch.Tensor, splits: Sequence[int] | None) -> int:
        if not splits:
            return int(tensor.nbytes * (world - 1) // world)
        row = tensor.nbytes // max(1, tensor.shape[0])
        return int((sum(splits) - splits[rank]) * row)

    return (
        outward(given["input"], given.get("input_split_sizes")),
        outward(given["output"], given.get("output_split_sizes")),
    )


def _reduce_scatter(world: int, rank: int, given: Mapping[str, Any]) -> tuple[int, int]:
    received = int(given["output"].nbytes) * (world - 1)
    if "input_list" in given:
        return sum(int(part.nbytes) for i, part in enumerate(given["input_list"]) if i != rank), received
    return int(given["input"].nbytes * (world - 1) // world), received


def _all_gather(world: int, rank: int, given: Mapping[str, Any]) -> tuple[int, int]:
    size = int(given["tensor" if "tensor" in given else "input_tensor"].nbytes)
    return size * (world - 1), size * (world - 1)


_PAYLOAD = {
    "all_to_all_single": _all_to_all,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather,
}


def count_collectives() -> dict[str, Collective]:
    """Count TorchRec's collectives in this process from now on, by name, until ``leave``."""
    counts: dict[str, Collective] = {}
    for module in (comm_ops, dist_data):
        module.dist = _Counting(counts)
    return counts


def leave() -> None:
    """TorchRec as it was before a run of several ranks: its collectives are not counted any more, and the
    process groups that it keeps for sharding by hosts are forgotten."""
    for module in (comm_ops, dist_data):
        module.dist = torch.distributed
    comm._INTRA_PG = comm._CROSS_PG = None


# -- torch ------------------------------------------------------------------------------------


def graph_is_kept() -> bool:
    """Whether the backward pass under way has ``retain_graph``: saved tensors must then stay as they are."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def functorch_is_active() -> bool:
    """Whether a transform such as ``torch.func.grad`` runs what is called."""
    return bool(torch._C._are_functorch_transforms_active())


def backward_number() -> int | None:
    """The number, in the order of the forward pass, of the operator that is being differentiated; None in a
    forward pass."""
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def forward_number() -> int:
    """The number that the next operator of a forward pass gets, as ``backward_number`` tells it."""
    return int(torch._C._autograd._get_sequence_nr())


def linear_pointwise(*arguments: Any) -> torch.Tensor:
    """oneDNN's linear layer with an operation on its result (``mkldnn::_linear_pointwise``)."""
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(*arguments)
    return out


def onednn_takes_bfloat16() -> bool:
    """Whether oneDNN runs bfloat16 on this CPU."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def watching_all_threads(every: bool) -> Any:
    """``experimental_config`` of torch's profiler: no public switch makes it watch all threads."""
    return _ExperimentalConfig(profile_all_threads=every)


def all_loaded() -> Any:
    """What ``load_state_dict`` returns where nothing was missing and nothing was left over."""
    return nn.modules.module._IncompatibleKeys([], [])
