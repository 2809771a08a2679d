"""Neo's order of work: cut the tables that are too costly for one rank, then place what there is.

One table above the mean load per rank bounds every placement of whole tables from below, so that no
heuristic helps: it must be split by rows or columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.types import Enumerator, Perf, Proposer, ShardingOption, Topology
from torchrec.distributed.types import ShardingType

from recpipe_neo.partition import work

ROW_TYPES = (
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
    ShardingType.GRID_SHARD.value,
)
SPLITS = (*ROW_TYPES, ShardingType.COLUMN_WISE.value, ShardingType.TABLE_COLUMN_WISE.value)
"""Sharding types that cut a table into parts."""

Options = dict[str, ShardingOption]
"""One option for each table, by the table's full name."""


class NeoSharder(EmbeddingBagCollectionSharder):  # type: ignore[misc]
    """TorchRec's sharder with the row-wise types on CPU too, where they run but are not offered."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """All types that TorchRec can shard bags by; ``ParameterConstraints`` narrow them down."""
        offered = super().sharding_types(compute_device_type)
        return [*offered, *(kind for kind in ROW_TYPES if kind not in offered)]


def cost(option: ShardingOption) -> float:
    """Of all shards of ``option``, ms summed over the ranks."""
    return sum(work(cast(Perf, shard.perf)) for shard in option.shards)


class SplitProposer(Proposer):  # type: ignore[misc]
    """Proposes whole tables, then tables cut where they exceed the mean load per rank.

    The proposals, in this order: every table unsplit; cut by the cheapest option of each table; cut by one
    sharding type alone, for each type (every type in a plan has exchanges of its own); then each of these
    with small tables replicated where that is cheaper. The planner's performance model chooses.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self.proposals: list[list[ShardingOption]] = []

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """Makes the proposals out of the options, whose ``perf`` is filled in."""
        tables = by_table(search_space)
        whole = {name: _cheapest(_of(options, _WHOLE) or options) for name, options in tables.items()}
        plans = [whole, split(whole, tables, self.world, SPLITS)]
        plans += [split(whole, tables, self.world, (kind,)) for kind in SPLITS]
        plans += [replicate(plan, tables) for plan in plans]
        self.proposals = unique([*plans, *self.further(whole, tables)])

    def further(self, whole: Options, tables: dict[str, list[ShardingOption]]) -> Iterable[Options]:
        """More plans; none here."""
        return ()

    def propose(self) -> list[ShardingOption] | None:
        """The next plan, or None after the last."""
        return self.proposals[0] if self.proposals else None

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Drops the plan that was tried."""
        self.proposals.pop(0)


_WHOLE = (ShardingType.TABLE_WISE.value,)


def by_table(search_space: Sequence[ShardingOption]) -> dict[str, list[ShardingOption]]:
    """The options of each table."""
    tables: dict[str, list[ShardingOption]] = {}
    for option in search_space:
        tables.setdefault(option.fqn, []).append(option)
    return tables


def split(
    whole: Options, tables: dict[str, list[ShardingOption]], world: int, kinds: Sequence[str]
) -> Options:
    """``whole`` with tables cut, the costliest first, until none exceeds the mean load per rank.

    Cutting adds cost and so raises the mean. A table that no type of ``kinds`` cuts stays whole.
    """
    plan = dict(whole)
    total = sum(map(cost, plan.values()))
    for name in sorted(plan, key=lambda name: -cost(plan[name])):
        before = cost(plan[name])
        parts = [option for option in _of(tables[name], kinds) if option.num_shards > 1]
        if before <= total / world:
            break
        if parts and _of([plan[name]], _WHOLE):
            plan[name] = _cheapest(parts)
            total += cost(plan[name]) - before
    return plan


def replicate(plan: Options, tables: dict[str, list[ShardingOption]]) -> Options:
    """``plan`` with data parallelism for the tables whose all-reduce costs less than their option."""
    chosen = dict(plan)
    for name, option in plan.items():
        chosen[name] = _cheapest([option, *_of(tables[name], (ShardingType.DATA_PARALLEL.value,))])
    return chosen


def unique(plans: Iterable[Options]) -> list[list[ShardingOption]]:
    """Each plan once, in order."""
    seen = {tuple(map(id, plan.values())): list(plan.values()) for plan in plans}
    return list(seen.values())


def _of(options: Sequence[ShardingOption], kinds: Sequence[str]) -> list[ShardingOption]:
    return [option for option in options if option.sharding_type in kinds]


def _cheapest(options: Sequence[ShardingOption]) -> ShardingOption:
    return min(options, key=cost)
