"""Placement of shards, against what any placement can reach."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from recpipe_neo.partition import (
    BestPartitioner,
    GreedyPartitioner,
    KarmarkarKarpPartitioner,
    LargestLoad,
    karmarkar_karp,
    rank_loads,
)
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.types import Partitioner, PlannerError, ShardingOption, Topology

from plugins.recpipe_neo.tests.rig import option, topology

PARTITIONERS = [GreedyPartitioner, KarmarkarKarpPartitioner]


def largest(costs: list[float], parts: list[int], k: int, loads: list[float] | None = None) -> float:
    return float(np.max(np.bincount(parts, costs, k) + (loads or [0.0] * k)))


def greedy(costs: list[float], k: int, loads: list[float] | None = None) -> list[int]:
    """Where ``GreedyPartitioner`` places table-wise tables beside a row-wise one with ``loads``."""
    before = [option("before", "row_wise", loads)] if loads else []
    tables = [option(f"t{i}", "table_wise", [cost]) for i, cost in enumerate(costs)]
    plan = GreedyPartitioner().partition([*before, *tables], topology(k))
    return [table.shards[0].rank for table in plan[len(before) :]]


def suite() -> list[tuple[list[float], int]]:
    """Lognormal costs of tables, 20 draws each of three sizes."""
    random = np.random.default_rng(7)
    shapes = [(10, 2), (100, 8), (500, 16)] * 20
    return [(random.lognormal(0, 1, n).tolist(), k) for n, k in shapes]


def test_the_textbook_example() -> None:
    """8 7 6 5 4 in two parts: differencing leaves 2, greedy 4, the best is 0."""
    costs = [8.0, 7, 6, 5, 4]
    assert largest(costs, karmarkar_karp(costs, 2), 2) == 16
    assert largest(costs, greedy(costs, 2), 2) == 17


def test_no_load_is_below_the_bound_and_differencing_is_better_on_average() -> None:
    ratios = []
    for costs, k in suite():
        bound = max(max(costs), sum(costs) / k)
        differenced, first_fit = (largest(costs, way(costs, k), k) for way in (karmarkar_karp, greedy))
        assert min(differenced, first_fit) >= bound * (1 - 1e-12)
        ratios.append((differenced / bound, first_fit / bound))
    differenced, first_fit = np.mean(ratios, axis=0) - 1
    assert differenced < 0.5 * first_fit


@pytest.mark.parametrize("way", [greedy, karmarkar_karp])
def test_loads_that_are_there_before_stay_where_they_are(way: type) -> None:
    """Of every assignment of six costs to three loaded parts, none is much better."""
    random = np.random.default_rng(3)
    for _ in range(10):
        costs, loads = random.random(6).tolist(), (3 * random.random(3)).tolist()
        best = min(largest(costs, list(p), 3, loads) for p in itertools.product(range(3), repeat=6))
        assert best - 1e-12 <= largest(costs, way(costs, 3, loads), 3, loads) <= 1.25 * best
    assert way([1.0, 1.0], 3, [5.0, 0.0, 0.0]) in ([1, 2], [2, 1])


@pytest.mark.parametrize("way", [greedy, karmarkar_karp])
def test_edges(way: type) -> None:
    assert way([], 3) == []
    assert way([2.0, 1.0], 1) == [0, 0]
    assert sorted(way([1.0, 1.0, 1.0], 5)) == sorted(set(way([1.0, 1.0, 1.0], 5))), "one for each part"


def test_differencing_is_never_worse_than_greedy_in_a_plan() -> None:
    for costs, k in suite():
        tables = [option(f"t{i}", "table_wise", [cost]) for i, cost in enumerate(costs)]
        loads = []
        for partitioner in (GreedyPartitioner(), KarmarkarKarpPartitioner()):
            loads.append(max(rank_loads(partitioner.partition(tables, topology(k)), k)))
        assert loads[1] <= loads[0]


def mixed() -> list[ShardingOption]:
    """Two hosts of two ranks: rank-bound options, one for a host, and free shards."""
    return [
        option("rows", "row_wise", [4.0, 1, 1, 1]),
        option("copies", "data_parallel", [1.0] * 4),
        option("host", "table_row_wise", [2.0, 2]),
        option("grid", "grid_shard", [1.0] * 4),
        option("columns", "column_wise", [3.0, 3]),
        *(option(f"t{i}", "table_wise", [cost]) for i, cost in enumerate([4.0, 2, 1, 1])),
    ]


@pytest.mark.parametrize("partitioner", PARTITIONERS)
def test_rank_bound_options_are_placed_as_torchrec_does(partitioner: type[Partitioner]) -> None:
    plan = partitioner().partition(mixed(), topology(4, local_world=2))
    for ours, theirs in zip(
        plan[:4], GreedyPerfPartitioner().partition(mixed()[:4], topology(4, local_world=2)), strict=True
    ):
        assert ours.get_shards_assignment() == theirs.get_shards_assignment()
    assert sum(rank_loads(plan, 4)) == 33
    assert max(rank_loads(plan, 4)) == 9, "the free shards fill up what the others leave"


@pytest.mark.parametrize("partitioner", PARTITIONERS)
def test_memory_of_a_rank_is_a_limit(partitioner: type[Partitioner]) -> None:
    """The cheap tables are the large ones: balancing costs alone would put two on one rank."""
    tables = [
        option("a", "table_wise", [9.0], [10]),
        option("b", "table_wise", [1.0], [60]),
        option("c", "table_wise", [1.0], [60]),
        option("rows", "row_wise", [1.0, 1], [30, 30]),
    ]
    limit = topology(2, 100)
    plan = partitioner().partition(tables, limit)
    used = np.zeros(2)
    for table in plan:
        for shard in table.shards:
            used[shard.rank] += shard.storage.ddr
    assert used.max() <= 100
    assert [device.storage.ddr for device in limit.devices] == [100, 100], "the topology is not used up"
    with pytest.raises(PlannerError, match=r"8 rows by 4 columns needs .* more than any rank has left"):
        partitioner().partition(tables, topology(2, 89))


def test_a_packing_that_only_fits_by_size_is_found() -> None:
    sizes = [40, 40, 60, 60]
    tables = [option(f"t{i}", "table_wise", [4.0 - i], [size]) for i, size in enumerate(sizes)]
    limit = topology(2, 100)
    for partitioner in PARTITIONERS:
        plan = partitioner().partition(tables, limit)
        assert plan[2].shards[0].rank != plan[3].shards[0].rank


class _AllOnTheFirst(Partitioner):  # type: ignore[misc]
    def partition(self, proposal: list[ShardingOption], storage_constraint: Topology) -> list[ShardingOption]:
        for table in proposal:
            for shard in table.shards:
                shard.rank = 0
        return proposal


def test_the_best_of_several_partitioners_is_taken() -> None:
    tables = [option("a", "table_wise", [2.0]), option("b", "table_wise", [1.0])]
    for order in ([_AllOnTheFirst(), GreedyPartitioner()], [GreedyPartitioner(), _AllOnTheFirst()]):
        plan = BestPartitioner(order, LargestLoad(2)).partition(tables, topology(2))
        assert rank_loads(plan, 2) == [2, 1]
