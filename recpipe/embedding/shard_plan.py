"""A sharding plan in plain values: printed, saved as JSON, loaded again, and as TorchRec's own type."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.sharding_plan import placement
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan

from recpipe.embedding.tables import TableSet, module_name
from recpipe.errors import UserError

SCHEMA = 1


@dataclass(frozen=True)
class Shard:
    """Rows [row, row + rows) and columns [column, column + columns) of a table on one rank."""

    rank: int
    row: int
    column: int
    rows: int
    columns: int
    predicted_ms: float | None = None
    """What the planner expects it to cost in a step, communication included; None: it did not say."""


@dataclass(frozen=True)
class TablePlan:
    """One table; ``sharding`` and ``kernel`` as TorchRec names them. A data-parallel one is on every rank."""

    sharding: str
    kernel: str
    rows: int
    dim: int
    ranks: tuple[int, ...]
    """As TorchRec's planner gave them; which of a table's ranks it lists depends on the sharding type."""
    shards: tuple[Shard, ...]

    @property
    def replicated(self) -> bool:
        """Whether every rank has all of it."""
        return self.sharding == "data_parallel"


@dataclass(frozen=True)
class ShardPlan:
    """Where every part of every table lies, over ``world`` ranks."""

    world: int
    tables: Mapping[str, TablePlan]

    def to_dict(self) -> dict[str, Any]:
        """As in plan.json."""
        return {"schema": SCHEMA, **asdict(self)}

    def torchrec(
        self, device: str, local_world: int, limits: Mapping[str, ParameterConstraints]
    ) -> ShardingPlan:
        """As TorchRec wants it, for the module whose child ``tables`` holds the tables."""
        made = {}
        for name, table in self.tables.items():
            spec = None
            if not table.replicated:
                spec = EnumerableShardingSpec([_metadata(s, device, local_world) for s in table.shards])
            limit = limits.get(name, ParameterConstraints())
            made[module_name(name)] = ParameterSharding(
                sharding_type=table.sharding,
                compute_kernel=table.kernel,
                ranks=list(table.ranks),
                sharding_spec=spec,
                **{field: getattr(limit, field) for field in _FROM_LIMITS},
            )
        return ShardingPlan({"tables": EmbeddingModuleShardingPlan(made)})


_FROM_LIMITS = ("cache_params", "enforce_hbm", "stochastic_rounding", "bounds_check_mode", "output_dtype")


def _metadata(shard: Shard, device: str, local_world: int) -> ShardMetadata:
    return ShardMetadata(
        shard_offsets=[shard.row, shard.column],
        shard_sizes=[shard.rows, shard.columns],
        placement=placement(device, shard.rank, local_world),
    )


def from_torchrec(
    plan: ShardingPlan, tables: TableSet, shard_ms: Mapping[str, Sequence[float]], world: int
) -> ShardPlan:
    """``plan`` of the module whose child ``tables`` holds ``tables``; ``shard_ms``: predicted, by module."""
    (module,) = plan.plan.values()
    made = {}
    for feature in tables.features:
        found = module[module_name(feature.name)]
        expected = shard_ms.get(module_name(feature.name), ())
        if found.sharding_spec is None:
            places = [(rank, 0, 0, feature.rows, tables.dim) for rank in range(world)]
        else:
            places = [
                (s.placement.rank(), *s.shard_offsets, *s.shard_sizes) for s in found.sharding_spec.shards
            ]
        ms = expected if len(expected) == len(places) else [None] * len(places)
        shards = tuple(Shard(*place, cost) for place, cost in zip(places, ms, strict=True))
        made[feature.name] = TablePlan(
            found.sharding_type, found.compute_kernel, feature.rows, tables.dim, tuple(found.ranks), shards
        )
    return ShardPlan(world, made)


def load_plan(path: Path) -> ShardPlan:
    """A plan.json; ``UserError`` where it cannot be read or does not cover its tables."""
    try:
        content = json.loads(path.read_text())
        if content["schema"] != SCHEMA:
            raise UserError(f"{path}: a plan of schema {content['schema']}, not {SCHEMA}; plan anew")
        tables = {
            str(name): TablePlan(
                **{
                    **table,
                    "ranks": tuple(table["ranks"]),
                    "shards": tuple(Shard(**s) for s in table["shards"]),
                }
            )
            for name, table in content["tables"].items()
        }
        plan = ShardPlan(int(content["world"]), tables)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as fault:
        raise UserError(
            f"{path} is no sharding plan ({type(fault).__name__}: {fault}); make one with task=plan"
        ) from fault
    for name, table in plan.tables.items():
        _check_cover(path, name, table, plan.world)
    return plan


def _check_cover(path: Path, name: str, table: TablePlan, world: int) -> None:
    """Every value of the table lies in exactly one shard, on a rank that there is."""
    bad = next((s for s in table.shards if not 0 <= s.rank < world), None)
    if bad is not None:
        raise UserError(f"{path}: table '{name}' has a shard on rank {bad.rank} of {world}; plan anew")
    if table.replicated:
        return
    area = sum(s.rows * s.columns for s in table.shards)
    inside = all(
        s.row >= 0 and s.row + s.rows <= table.rows and s.column >= 0 and s.column + s.columns <= table.dim
        for s in table.shards
    )
    if area != table.rows * table.dim or not inside or _overlap(table.shards):
        raise UserError(
            f"{path}: the shards of table '{name}' do not tile its {table.rows} x {table.dim} values; "
            "plan anew"
        )


def _overlap(shards: Sequence[Shard]) -> bool:
    return any(
        a.row < b.row + b.rows
        and b.row < a.row + a.rows
        and a.column < b.column + b.columns
        and b.column < a.column + a.columns
        for i, a in enumerate(shards)
        for b in shards[i + 1 :]
        if a.rows and b.rows
    )
