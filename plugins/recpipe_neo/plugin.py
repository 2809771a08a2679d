"""Neo as a plugin: limits of placements, the planner, and the precision in which tables are stored and
sent."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torchrec.distributed.planner.types import ParameterConstraints, Topology
from torchrec.distributed.types import CommOp, ShardingPlanner, ShardingType

from recpipe.kit import module_name, wire_codecs
from recpipe.plugin import (
    Context,
    Contribution,
    Direction,
    Invariant,
    Planner,
    Plugin,
    PluginError,
    Quantizer,
    TableInfo,
)
from recpipe_neo.partition import ROW_TYPES
from recpipe_neo.planner import PLANNERS, PlanRecord, make_planner
from recpipe_neo.stats import feature_stats

if TYPE_CHECKING:
    from recpipe_perf_model import Facts, Statement


SAMPLED_BATCHES = 4
"""How many batches the planners sample to learn what is looked up."""
SHARDING_TYPES = tuple(t.value for t in ShardingType)
WIRE_PRECISIONS = ("fp32", "fp16", "bf16", "int8")
"""What ``wire_codecs`` takes."""
TABLE_PRECISIONS = ("fp32", "fp16")
"""FBGEMM trains no rows of bfloat16, neither on a CPU nor on a GPU."""


class Neo(Plugin):
    """Sharded tables with a choice of planners and precisions (arXiv 2104.05158)."""

    api = (2, 4)

    def __init__(
        self,
        *,
        planner: str,
        sharding: Mapping[str, Any] | list[str] | str | None,
        forward_precision: str,
        backward_precision: str,
        table_precision: str,
        stochastic_rounding: bool,
        profile_dir: str | None,
    ) -> None:
        _one_of("planner", planner, PLANNERS)
        _one_of("forward_precision", forward_precision, WIRE_PRECISIONS)
        _one_of("backward_precision", backward_precision, WIRE_PRECISIONS)
        _one_of("table_precision", table_precision, TABLE_PRECISIONS)
        self.planner, self.profile_dir = planner, profile_dir
        found = {}
        by_table = sharding if isinstance(sharding, Mapping) else {"*": sharding} if sharding else {}
        for pattern, types in by_table.items():
            chosen = (types,) if isinstance(types, str) else tuple(types)
            for each in chosen:
                _one_of(f"sharding.{pattern}", each, SHARDING_TYPES)
            found[str(pattern)] = chosen
        self.types = found
        self.wire = (forward_precision, backward_precision)
        self.table_precision, self.stochastic_rounding = table_precision, stochastic_rounding
        altered = set()
        if self.wire != ("fp32", "fp32") or table_precision != "fp32":
            altered.add(Invariant.EXACT_GRADIENT)
        if table_precision != "fp32":
            altered.add(Invariant.TABLE_LAYOUT)
        self.alters = frozenset(altered)

    def contribute(self, ctx: Context) -> Contribution:
        """The planner, and the types in which tables are stored and sent."""
        for pattern in self.types:
            if not any(fnmatchcase(name, pattern) for name in ctx.tables):
                raise PluginError(
                    f"plugins.neo.sharding: no table is called '{pattern}'; there are {', '.join(ctx.tables)}"
                )
        if self.stochastic_rounding and not ctx.device.startswith("cuda"):
            raise PluginError(
                "plugins.neo.stochastic_rounding=true: FBGEMM rounds at random on GPUs alone and ignores the "
                "wish on a CPU; set it to false"
            )
        cache = Path(self.profile_dir).expanduser() if self.profile_dir else ctx.cache_dir
        pooled = [table.pooled for table in ctx.tables.values()]
        return Contribution(
            planner=NeoPlanner(self, ctx, cache),
            quantizer=LowPrecision(self.table_precision, self.wire, pooled) if self.alters else None,
            report=[lambda run: {"altered": self._altered(ctx.trainers)}] if self.alters else [],
        )

    def _altered(self, trainers: int) -> str:
        """Which of the invariants a run altered: none if only rows between ranks would have been rounded, and
        there is one."""
        used = trainers > 1 or self.table_precision != "fp32"
        return ", ".join(sorted(i.name for i in self.alters)) if used else "nothing"

    def limits(self, table: TableInfo, ranks: int) -> ParameterConstraints:
        """The limits of the recipe for a table over ``ranks``; the first matching pattern counts."""
        said = next((t for pattern, t in self.types.items() if fnmatchcase(table.name, pattern)), None)
        types = list(said or SHARDING_TYPES)
        if "int8" in self.wire and table.pooled:
            types = [t for t in types if t not in ROW_TYPES]
            if not types:
                raise PluginError(
                    f"plugins.neo.sharding: table '{table.name}' is to be {', '.join(said or ())}, but "
                    "TorchRec has no int8 reduce-scatter; use fp16 or bf16 between ranks, or table_wise or "
                    "column_wise"
                )
        return ParameterConstraints(
            sharding_types=types if said or len(types) < len(SHARDING_TYPES) else None,
            # As many column-wise parts as ranks, if the recipe limits the types.
            min_partition=max(4, -(-table.dim // max(2, ranks) // 4) * 4) if said else None,
            stochastic_rounding=self.stochastic_rounding if self.table_precision != "fp32" else None,
        )

    def costs(self, facts: Facts) -> Statement:
        """State what the performance model needs for a prediction without a run: as if tables were given, the
        largest first, to the rank that has least to look up, and those that are too large for one were cut by
        rows."""
        from recpipe_perf_model import Statement, busiest_part

        ranks = facts.trainers
        if ranks == 1:
            return Statement(why="one rank has all tables: there is nothing to place")
        spread = busiest_part(facts)
        return Statement(
            why=(
                f"the busiest of {ranks} ranks has {spread:.0%} of the lookups; ids and rows go between ranks"
            ),
            spread=spread,
            unsure="its planner goes by the times of tables, and may cut more of them",
        )


class NeoPlanner(Planner):
    """Makes the planner for the run's data. ``prediction``, where core looks for it, has what it predicts."""

    def __init__(self, knobs: Neo, ctx: Context, cache_dir: Path | None) -> None:
        self.knobs, self.ctx, self.cache_dir = knobs, ctx, cache_dir

    def constrain(self, table: TableInfo) -> ParameterConstraints:
        """The recipe's limits for ``table``."""
        return self.knobs.limits(table, self.ctx.trainers)

    def make(self, topology: Topology, constraints: Mapping[str, ParameterConstraints]) -> ShardingPlanner:
        """The planner that the recipe names."""
        ctx, record = self.ctx, PlanRecord()
        kind = self.knobs.planner
        planner: Any = make_planner(
            kind,
            topology,
            constraints,
            -(-ctx.batch_size // topology.world_size),
            feature_stats(islice(ctx.batches(0), SAMPLED_BATCHES)) if kind != "torchrec" else {},
            self.cache_dir / "perf" if self.cache_dir else None,
            record,
            {module_name(name): info.features for name, info in ctx.tables.items() if info.features} or None,
        )
        planner.prediction = record
        return cast(ShardingPlanner, planner)


def _one_of(knob: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(choices)}"
        raise PluginError(f"plugins.neo.{knob}={value} is unknown; {hint}")


class LowPrecision(Quantizer):
    """Stores all tables in one type, and sends rows and gradients in others.

    ``wire``: the precisions of rows and of their gradients; ``pooled``: for each table, whether its rows are
    summed by bag.
    """

    def __init__(self, table: str, wire: tuple[str, str], pooled: Iterable[bool] = (True,)) -> None:
        self.table, self.wire, self.pooled = table, wire, tuple(pooled)

    def storage(self, table: TableInfo) -> str | None:
        """None for float32, so that other plugins may decide."""
        return None if self.table == "fp32" else self.table

    def codecs(self) -> Mapping[tuple[CommOp, Direction], Any]:
        """TorchRec's."""
        return wire_codecs(*self.wire, self.pooled)
