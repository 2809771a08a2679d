"""Neo's procedure: first cut the tables that are too costly for one rank, then place all parts.

A table that costs more than the mean load per rank limits every placement of whole tables, whatever the
heuristic; it must be split by rows or columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from torchrec.distributed.planner.types import Enumerator, Perf, Proposer, ShardingOption, Topology
from torchrec.distributed.types import ShardingType

from recpipe_neo.partition import work

ROW_TYPES = (
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
    ShardingType.GRID_SHARD.value,
)
"""Sharding types whose pooled rows are sums over ranks, which takes a reduce-scatter."""
SPLITS = (*ROW_TYPES, ShardingType.COLUMN_WISE.value, ShardingType.TABLE_COLUMN_WISE.value)
"""Sharding types that cut a table into parts."""

_WHOLE = (ShardingType.TABLE_WISE.value,)
MOST_CUT = 8
"""The most tables, beginning with the costliest, that a thorough proposer cuts."""
Plan = dict[str, ShardingOption]
"""A plan: one option for each table, by the table's full name."""
Tables = dict[str, list[ShardingOption]]
"""All of a table's options."""


def cost(option: ShardingOption) -> float:
    """The cost of all shards of ``option``, in ms summed over the ranks."""
    return sum(work(cast(Perf, shard.perf)) for shard in option.shards)


class SplitProposer(Proposer):  # type: ignore[misc]
    """Proposes whole tables, then plans in which tables above the mean load per rank are cut.

    The proposals are, in this order: every table unsplit; costly tables cut by their cheapest option; costly
    tables cut by a single sharding type, for each type (every type in a plan has its own exchanges); with
    ``thorough``, the costliest one, two, ... tables cut, and each table's cheapest option; then each of these
    with small tables replicated if that is cheaper. The planner's performance model chooses.
    """

    def __init__(
        self, world: int, cost: Callable[[ShardingOption], float] = cost, thorough: bool = False
    ) -> None:
        self.world = world
        self.cost = cost
        self.thorough = thorough
        self.proposals: list[list[ShardingOption]] = []

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """Make the proposals from the options, whose ``perf`` is set."""
        tables: Tables = {}
        for option in search_space:
            tables.setdefault(option.fqn, []).append(option)
        whole = {
            name: min(_of(options, _WHOLE) or options, key=self.cost) for name, options in tables.items()
        }
        ways = (SPLITS, *((kind,) for kind in SPLITS))
        plans = [whole, *(self.split(whole, tables, kinds) for kinds in ways)]
        if self.thorough:
            plans += [self.cut(whole, tables, kinds, n) for kinds in ways for n in range(1, MOST_CUT + 1)]
            plans.append({name: min(options, key=self.cost) for name, options in tables.items()})
        plans += [self.replicate(plan, tables) for plan in plans]
        seen = {tuple(map(id, plan.values())): list(plan.values()) for plan in plans}
        self.proposals = list(seen.values())

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

    def split(self, whole: Plan, tables: Tables, kinds: Sequence[str]) -> Plan:
        """``whole`` with tables cut, the costliest first, until none exceeds the mean load per rank.

        Cutting adds cost and so raises the mean. Tables that no type of ``kinds`` cuts stay whole.
        """
        plan = dict(whole)
        total = sum(map(self.cost, plan.values()))
        for name in self._costliest(plan):
            before = self.cost(plan[name])
            if before <= total / self.world:
                break
            plan[name] = self._cut(plan[name], tables[name], kinds)
            total += self.cost(plan[name]) - before
        return plan

    def cut(self, whole: Plan, tables: Tables, kinds: Sequence[str], number: int) -> Plan:
        """``whole`` with its ``number`` costliest tables cut."""
        plan = dict(whole)
        for name in self._costliest(plan)[:number]:
            plan[name] = self._cut(plan[name], tables[name], kinds)
        return plan

    def replicate(self, plan: Plan, tables: Tables) -> Plan:
        """``plan`` with data parallelism for tables whose all-reduce costs less than their option."""
        copies = {name: _of(tables[name], (ShardingType.DATA_PARALLEL.value,)) for name in plan}
        return {name: min([option, *copies[name]], key=self.cost) for name, option in plan.items()}

    def _cut(
        self, option: ShardingOption, options: Sequence[ShardingOption], kinds: Sequence[str]
    ) -> ShardingOption:
        parts = [other for other in _of(options, kinds) if other.num_shards > 1]
        return min(parts, key=self.cost) if parts and option.sharding_type in _WHOLE else option

    def _costliest(self, plan: Plan) -> list[str]:
        return sorted(plan, key=lambda name: -self.cost(plan[name]))


def _of(options: Sequence[ShardingOption], kinds: Sequence[str]) -> list[ShardingOption]:
    return [option for option in options if option.sharding_type in kinds]
