"""A sharding plan in plain values, which can be printed, saved as JSON, loaded, and converted to TorchRec's
type."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.sharding_plan import calculate_shard_sizes_and_offsets, placement
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
)

from recpipe.common.saved import Damaged, entries, read_json, typed_as
from recpipe.common.tensors import tiles
from recpipe.errors import UserError
from recpipe.private_api import OWN_KERNEL, EnumerableShardingSpec, ShardMetadata, module_name
from recpipe.tables.groups import ModelTables
from recpipe.tables.sharding.modules import module_paths

SCHEMA = 1
_SHARDINGS = {kind.value for kind in ShardingType}
_DENSE = EmbeddingComputeKernel.DENSE.value
_KERNELS = (
    _DENSE,
    EmbeddingComputeKernel.FUSED.value,
    EmbeddingComputeKernel.FUSED_UVM.value,
    EmbeddingComputeKernel.FUSED_UVM_CACHING.value,
)
"""TorchRec's sharding types whose tables recpipe can read and write."""
_FROM_LIMITS = ("cache_params", "enforce_hbm", "stochastic_rounding", "bounds_check_mode", "output_dtype")
_LARGEST = 2**60
"""Most values of a table: more than any machine has, but within the range of TorchRec's arithmetic."""


@dataclass(frozen=True)
class Shard:
    """Rows [row, row + rows) and columns [column, column + columns) of a table on one rank."""

    rank: int
    row: int
    column: int
    rows: int
    columns: int
    predicted_ms: float | None = None
    """The milliseconds that the planner predicts for it in a step, communication included; None: not
    known."""


@dataclass(frozen=True)
class TablePlan:
    """The plan of one table, with TorchRec's names of ``sharding`` and ``kernel``. A data-parallel table is
    on every rank."""

    sharding: str
    kernel: str
    rows: int
    dim: int
    ranks: tuple[int, ...]
    """The ranks that TorchRec's planner listed; which of a table's ranks these are depends on the sharding
    type."""
    shards: tuple[Shard, ...]

    @property
    def replicated(self) -> bool:
        """Whether every rank has the whole table."""
        return self.sharding == "data_parallel"


@dataclass(frozen=True)
class ShardPlan:
    """The place of every part of every table, over ``world`` ranks."""

    world: int
    tables: Mapping[str, TablePlan]

    def to_dict(self) -> dict[str, Any]:
        """The content of plan.json."""
        return {"schema": SCHEMA, **asdict(self)}

    def torchrec(
        self,
        device: torch.device,
        local_world: int,
        limits: Mapping[str, ParameterConstraints],
        tables: ModelTables,
        tiered: Collection[str] = (),
    ) -> ShardingPlan:
        """TorchRec's plan for a model with the groups of ``tables`` at their paths; this rank's
        is on ``device``. TorchRec makes no memory for shards of the ``tiered`` tables."""
        # Of several processes each has the GPU of its local rank, a single one perhaps another.
        places = [placement(device.type, rank, local_world) for rank in range(self.world)]
        if self.world == 1:
            places = [f"rank:0/{device}"]
        made = {}
        for path, group in zip(module_paths(tables), tables.groups, strict=True):
            module = {}
            for name in group.tables.layout.tables:
                table, limit, spec = self.tables[name], limits.get(name, ParameterConstraints()), None
                if not table.replicated:
                    spec = EnumerableShardingSpec(
                        [
                            ShardMetadata([s.row, s.column], [s.rows, s.columns], places[s.rank])
                            for s in table.shards
                        ]
                    )
                module[module_name(name)] = ParameterSharding(
                    sharding_type=table.sharding,
                    compute_kernel=OWN_KERNEL if name in tiered and not table.replicated else table.kernel,
                    ranks=list(table.ranks),
                    sharding_spec=spec,
                    **{field: getattr(limit, field) for field in _FROM_LIMITS},
                )
            made[path] = EmbeddingModuleShardingPlan(module)
        return ShardingPlan(made)


def from_torchrec(
    plan: ShardingPlan, tables: ModelTables, shard_ms: Mapping[str, Sequence[float]], world: int
) -> ShardPlan:
    """Convert TorchRec's ``plan`` of a model with the groups of ``tables``. ``shard_ms``: predicted
    milliseconds by module."""
    made = {}
    for path, group in zip(module_paths(tables), tables.groups, strict=True):
        module, dim = plan.plan[path], group.tables.dim
        for table in group.tables.tables:
            found = module[module_name(table.name)]
            expected = shard_ms.get(module_name(table.name), ())
            if found.sharding_spec is None:
                places = [(rank, 0, 0, table.rows, dim) for rank in range(world)]
            else:
                places = [
                    (s.placement.rank(), *s.shard_offsets, *s.shard_sizes) for s in found.sharding_spec.shards
                ]
            ms = expected if len(expected) == len(places) else [None] * len(places)
            shards = tuple(Shard(*place, cost) for place, cost in zip(places, ms, strict=True))
            made[table.name] = TablePlan(
                found.sharding_type, found.compute_kernel, table.rows, dim, tuple(found.ranks), shards
            )
    return ShardPlan(world, made)


def load_plan(path: Path) -> ShardPlan:
    """Load a plan.json; ``UserError`` if it cannot be read or its shards do not fit their sharding types."""
    try:
        content = read_json(path)
        schema = entries({"schema": int}, content)["schema"]
        if schema != SCHEMA:
            raise UserError(f"{path}: a plan of schema {schema}, not {SCHEMA}; plan anew")
        plan = typed_as(ShardPlan, {k: v for k, v in content.items() if k != "schema"})
        for name, table in plan.tables.items():
            _check(name, table, plan.world)
    except (OSError, ValueError) as fault:
        raise UserError(f"{path} is no sharding plan ({fault}); make one with task=plan") from fault
    return plan


def _check(name: str, table: TablePlan, world: int) -> None:
    """``Damaged`` unless the shards are those that TorchRec makes for the sharding type, on existing
    ranks."""
    known = (_DENSE,) if table.replicated else _KERNELS
    if table.sharding not in _SHARDINGS or table.kernel not in known:
        raise Damaged(
            f"table '{name}' is {table.sharding!r} with kernel {table.kernel!r}: there is no such table"
        )
    ranks = [s.rank for s in table.shards]
    strange = next((r for r in (*ranks, *table.ranks) if not 0 <= r < world), None)
    if strange is not None:
        raise Damaged(f"table '{name}' has a shard on rank {strange} of {world}")
    if table.replicated:
        return
    parts = [(s.row, s.column, s.rows, s.columns) for s in table.shards]
    counted = parts and min(p[3] for p in parts) > 0 and table.rows * table.dim < _LARGEST
    if not counted or not tiles(parts, table.rows, table.dim):
        raise Damaged(f"the shards of table '{name}' do not tile its {table.rows} x {table.dim} values")
    # By these cuts and ranks TorchRec computes a row's rank at run time.
    hosts = [s.rank for s in table.shards if s.column == 0]  # the ranks that share the table's rows
    sizes, offsets = calculate_shard_sizes_and_offsets(
        torch.empty(table.rows, table.dim, device="meta"),
        len(hosts),
        len(hosts),
        table.sharding,
        table.shards[0].columns,
    )
    found = ([[s.rows, s.columns] for s in table.shards], [[s.row, s.column] for s in table.shards])
    in_order = table.sharding != ShardingType.ROW_WISE.value or ranks == list(range(world))
    if found != (sizes, offsets) or not in_order or ranks != list(table.ranks):
        raise Damaged(f"table '{name}' is not cut, or its ranks not listed, as {table.sharding} needs it")
