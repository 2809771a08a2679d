"""Assigns shards to ranks: k-way number partitioning of the shards' costs (Neo, ISCA'22, greedy and
Karmarkar-Karp heuristics), within each rank's memory; and cuts, before that, the tables that are too costly
for one rank.

A table that costs more than the mean load per rank limits every placement of whole tables, whatever the
heuristic; it must be split by rows or columns.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import cast

from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.types import (
    Enumerator,
    PartitionByType,
    Partitioner,
    Perf,
    PerfModel,
    PlannerError,
    PlannerErrorType,
    Proposer,
    Shard,
    ShardingOption,
    Storage,
    Topology,
)
from torchrec.distributed.types import ShardingType


def karmarkar_karp(costs: Sequence[float], k: int, loads: Sequence[float] | None = None) -> list[int]:
    """The part, 0 .. k - 1, of each cost, by the largest differencing method (Karmarkar and Karp, 1982).

    Every cost starts as a solution with k loads, of which all but one are 0. The two solutions with the
    largest spread are joined, the most loaded part of one with the least loaded part of the other, until one
    solution is left. ``loads``, the loads of the k parts before, is one more such solution, whose parts keep
    their numbers.
    """
    start = list(loads or [0.0] * k)
    # A solution: (-spread, unique number, loads ascending, items of each part, number of each part or -1).
    solutions = [_solution(0, [(load, [], part) for part, load in enumerate(start)])]
    for item, cost in enumerate(costs):
        rest: list[_Part] = [(0.0, [], -1) for _ in range(k - 1)]
        solutions.append(_solution(item + 1, [*rest, (cost, [item], -1)]))
    heapq.heapify(solutions)
    while len(solutions) > 1:
        _, number, first = heapq.heappop(solutions)
        _, _, second = heapq.heappop(solutions)
        joined = [
            (a[0] + b[0], a[1] + b[1], max(a[2], b[2])) for a, b in zip(first, reversed(second), strict=True)
        ]
        heapq.heappush(solutions, _solution(number, joined))
    parts = [0] * len(costs)
    for _, items, part in solutions[0][2]:
        for item in items:
            parts[item] = part
    return parts


_Part = tuple[float, list[int], int]
"""Load, items, and the part's number (-1 until it is joined with a part that has one)."""


def _solution(number: int, parts: list[_Part]) -> tuple[float, int, list[_Part]]:
    parts.sort(key=lambda part: part[0])
    return parts[0][0] - parts[-1][0], number, parts


def work(perf: Perf) -> float:
    """A shard's whole cost. TorchRec's total leaves out the input dist, which its pipelines can hide."""
    return float(perf.total + perf.input_dist_comms)


def rank_loads(plan: Sequence[ShardingOption], world: int) -> list[float]:
    """The cost of the shards on each rank of a placed plan."""
    loads = [0.0] * world
    for option in plan:
        for shard in option.shards:
            loads[cast(int, shard.rank)] += work(cast(Perf, shard.perf))
    return loads


class LargestLoad(PerfModel):  # type: ignore[misc]
    """Rates a plan by the cost of its most loaded rank."""

    def __init__(self, world: int) -> None:
        self.world = world

    def rate(self, plan: list[ShardingOption]) -> float:
        """The cost in the unit of the shards' ``perf``, ms."""
        return max(rank_loads(plan, self.world))


class GreedyPartitioner(Partitioner):  # type: ignore[misc]
    """Places the largest shard first, each on the least loaded rank that has room for it.

    Only the shards of table-wise and column-wise options may go to any rank. TorchRec's
    ``GreedyPerfPartitioner`` places the others, and their load counts. Raises ``PlannerError`` if something
    does not fit.
    """

    def partition(self, proposal: list[ShardingOption], storage_constraint: Topology) -> list[ShardingOption]:
        """``proposal`` with every shard's ``rank`` set; ``storage_constraint`` does not change."""
        free = [o.partition_by == PartitionByType.DEVICE.value and o.dependency is None for o in proposal]
        fixed = [option for option, freely in zip(proposal, free, strict=True) if not freely]
        shards = [s for option, freely in zip(proposal, free, strict=True) if freely for s in option.shards]
        if fixed:
            GreedyPerfPartitioner().partition(fixed, storage_constraint)
        loads = rank_loads(fixed, storage_constraint.world_size)
        room = [device.storage for device in storage_constraint.devices]
        for shard in (shard for option in fixed for shard in option.shards):
            rank = cast(int, shard.rank)
            room[rank] = room[rank] - cast(Storage, shard.storage)
        for shard, rank in zip(shards, self._places(shards, loads, room), strict=True):
            shard.rank = rank
        return proposal

    def _places(self, shards: Sequence[Shard], loads: Sequence[float], room: Sequence[Storage]) -> list[int]:
        return _greedy_within(shards, loads, room)


class KarmarkarKarpPartitioner(GreedyPartitioner):
    """The largest differencing method, or the greedy placement if that is better or if only that fits."""

    def _places(self, shards: Sequence[Shard], loads: Sequence[float], room: Sequence[Storage]) -> list[int]:
        costs = [work(cast(Perf, shard.perf)) for shard in shards]
        parts = karmarkar_karp(costs, len(loads), loads)
        left = list(room)
        for shard, part in zip(shards, parts, strict=True):
            left[part] = left[part] - cast(Storage, shard.storage)
        if not all(Storage(0, 0, 0).fits_in(storage) for storage in left):
            return _greedy_within(shards, loads, room)
        try:
            other = _greedy_within(shards, loads, room)
        except PlannerError:
            return parts

        def largest(places: Sequence[int]) -> float:
            sums = list(loads)
            for cost, part in zip(costs, places, strict=True):
                sums[part] += cost
            return max(sums)

        return min(parts, other, key=largest)


class BestPartitioner(Partitioner):  # type: ignore[misc]
    """Takes, of several partitioners' placements, the one that ``model`` rates best."""

    def __init__(self, partitioners: Sequence[Partitioner], model: PerfModel) -> None:
        self.partitioners = partitioners
        self.model = model

    def partition(self, proposal: list[ShardingOption], storage_constraint: Topology) -> list[ShardingOption]:
        """``proposal`` with every shard's ``rank`` set; raises ``PlannerError`` if no partitioner can place
        it."""
        rated: list[tuple[float, list[list[int | None]]]] = []
        failure: PlannerError | None = None
        for partitioner in self.partitioners:
            try:
                plan = partitioner.partition(proposal, storage_constraint)
            except PlannerError as error:
                failure = error
                continue
            rated.append((self.model.rate(plan), [option.get_shards_assignment() for option in plan]))
        if not rated:
            assert failure is not None, "there is a partitioner"
            raise failure
        _, best = min(rated, key=lambda entry: entry[0])
        for option, ranks in zip(proposal, best, strict=True):
            for shard, rank in zip(option.shards, ranks, strict=True):
                shard.rank = rank
        return proposal


def _greedy_within(shards: Sequence[Shard], loads: Sequence[float], room: Sequence[Storage]) -> list[int]:
    """Greedy placement by cost; if a large table then finds no room, by size, as in TorchRec."""
    try:
        return _first_fit(shards, loads, room, [work(cast(Perf, shard.perf)) for shard in shards])
    except PlannerError:
        sizes = [cast(Storage, shard.storage) for shard in shards]
        return _first_fit(shards, loads, room, [size.hbm + size.ddr + size.ssd for size in sizes])


def _first_fit(
    shards: Sequence[Shard],
    loads: Sequence[float],
    room: Sequence[Storage],
    weights: Sequence[float],
) -> list[int]:
    """The rank of each shard: those that weigh most come first, and each goes to the least loaded rank that
    has room for it (longest processing time first, Graham, 1969)."""
    load, left = list(loads), list(room)
    parts = [0] * len(shards)
    for item in sorted(range(len(shards)), key=lambda item: -weights[item]):
        storage = cast(Storage, shards[item].storage)
        ranks = [rank for rank in range(len(load)) if storage.fits_in(left[rank])]
        if not ranks:
            raise PlannerError(
                f"a shard of {shards[item].size[0]} rows by {shards[item].size[1]} columns needs {storage}, "
                "more than any rank has left",
                PlannerErrorType.PARTITION,
            )
        rank = min(ranks, key=load.__getitem__)
        parts[item] = rank
        load[rank] += work(cast(Perf, shards[item].perf))
        left[rank] = left[rank] - storage
    return parts


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
