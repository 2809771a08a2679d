"""Which tables are cut, and by what."""

from __future__ import annotations

from recpipe_neo.partition import KarmarkarKarpPartitioner, SplitProposer, cost, rank_loads
from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption

from plugins.recpipe_neo.tests.rig import collection, option, options, topology
from recpipe.tables.sharding.planning import TableSharder

FUSED = ["fused", "dense"]


def proposals(space: list[ShardingOption], world: int) -> list[dict[str, ShardingOption]]:
    proposer = SplitProposer(world)
    proposer.load(space)
    plans = []
    while plan := proposer.propose():
        plans.append({table.name: table for table in plan})
        proposer.feedback(True)
    return plans


def kinds(plan: dict[str, ShardingOption]) -> dict[str, str]:
    return {name: table.sharding_type for name, table in plan.items()}


def space() -> list[ShardingOption]:
    """A table above the mean load of two ranks and two below; one is cheap to copy."""
    return [
        option("large", "table_wise", [10.0]),
        option("large", "row_wise", [6.0, 6]),
        option("large", "column_wise", [5.5, 5.5]),
        option("middle", "table_wise", [3.0]),
        option("middle", "row_wise", [1.5, 1.5]),
        option("small", "table_wise", [1.0]),
        option("small", "data_parallel", [0.25, 0.25]),
    ]


def test_the_first_proposal_is_whole_and_the_second_cuts_what_exceeds_the_mean() -> None:
    plans = proposals(space(), 2)
    assert kinds(plans[0]) == {"large": "table_wise", "middle": "table_wise", "small": "table_wise"}
    assert kinds(plans[1]) == {"large": "column_wise", "middle": "table_wise", "small": "table_wise"}
    assert {plan["large"].sharding_type for plan in plans} == {"table_wise", "row_wise", "column_wise"}
    assert any(kinds(plan)["small"] == "data_parallel" for plan in plans)
    assert {plan["middle"].sharding_type for plan in plans} == {"table_wise"}
    assert len({tuple(kinds(plan).items()) for plan in plans}) == len(plans) == 6


def test_cutting_goes_on_until_no_table_exceeds_the_mean() -> None:
    """Four ranks: the mean is 15 / 4, so that both a and b must go."""
    tables = [
        option("a", "table_wise", [8.0]),
        option("a", "row_wise", [2.0] * 4),
        option("b", "table_wise", [6.0]),
        option("b", "row_wise", [1.5] * 4),
        option("c", "table_wise", [1.0]),
        option("c", "row_wise", [0.25] * 4),
    ]
    plan = proposals(tables, 4)[1]
    assert kinds(plan) == {"a": "row_wise", "b": "row_wise", "c": "table_wise"}
    placed = KarmarkarKarpPartitioner().partition(list(plan.values()), topology(4))
    assert max(rank_loads(placed, 4)) == 4.5


def test_a_column_option_of_one_part_is_not_a_split() -> None:
    tables = [option("a", "table_wise", [8.0]), option("a", "column_wise", [7.0])]
    assert [kinds(plan) for plan in proposals(tables, 2)] == [{"a": "table_wise"}]


def test_a_table_that_must_not_be_whole_is_proposed_as_it_may_be() -> None:
    tables = [option("a", "row_wise", [2.0, 2]), option("a", "column_wise", [1.0, 1])]
    assert [kinds(plan) for plan in proposals(tables, 2)] == [{"a": "column_wise"}]


def test_the_search_space_on_cpu_has_rows_and_obeys_constraints() -> None:
    """TorchRec's sharder offers no row-wise type on CPU; columns only where the recipe allows them."""
    rows = ["table_wise", "row_wise", "table_row_wise", "data_parallel"]
    limits = {
        "a": ParameterConstraints(sharding_types=rows, compute_kernels=FUSED),
        "b": ParameterConstraints(sharding_types=["column_wise", "grid_shard"], min_partition=8),
    }
    found = options(collection({"a": (1000, 16), "b": (1000, 16)}), 2, limits)
    assert {o.sharding_type for o in found if o.name == "a"} == set(rows)
    assert {o.sharding_type for o in found if o.name == "b"} == {"column_wise", "grid_shard"}
    assert all(
        o.compute_kernel == ("dense" if o.sharding_type == "data_parallel" else "fused") for o in found
    )
    assert all(cost(o) > 0 for o in found)
    types = TableSharder().sharding_types("cuda")
    assert len(types) == len(set(types)), "on CUDA TorchRec has them all"
