"""Which shard holds which rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recpipe_perf_model import Costs, Load
from recpipe_scale_out.facts import TableFacts
from recpipe_scale_out.lookups import Parts, TableLookup, runs
from recpipe_scale_out.plan import hottest, joined, named_plan, plan_content, planned, read_plan

from recpipe.errors import UserError
from recpipe.plugin import Planner, TableInfo


def facts(**tables: tuple[int, float | None, int]) -> dict[str, TableFacts]:
    """Tables by name: rows of 64 bytes, lookups of a sample, and net."""
    return {
        name: TableFacts(TableInfo(name, rows, 16, True, (name,)), 64, net, lookups, None)
        for name, (rows, lookups, net) in tables.items()
    }


FACTS = facts(a=(100, 1.0, 0), b=(60, 30.0, 0), c=(50, 1.0, 0), d=(40, 20.0, 1), e=(30, 1.0, 1))


def on(parts: Parts, shards: int) -> list[set[str]]:
    """The tables of each shard."""
    return [{name for name, own in parts.items() for shard, _, _ in own if shard == n} for n in range(shards)]


def held(parts: Parts, shards: int) -> list[int]:
    """The rows of each shard."""
    return [
        sum(rows for own in parts.values() for shard, _, rows in own if shard == n) for n in range(shards)
    ]


def test_capacity_load_and_nets_put_tables_where_each_says() -> None:
    assert on(named_plan("capacity", FACTS, 2, None, False), 2) == [{"a", "d"}, {"b", "c", "e"}]
    assert on(named_plan("load", FACTS, 2, None, False), 2) == [{"b"}, {"a", "c", "d", "e"}]
    assert on(named_plan("net", FACTS, 3, None, False), 3) == [{"a"}, {"b", "c"}, {"d", "e"}]
    assert on(named_plan("net", FACTS, 1, None, False), 1) == [set(FACTS)]
    three = facts(a=(9, 1.0, 0), b=(5, 1.0, 1), c=(6, 1.0, 2))
    assert on(named_plan("net", three, 2, None, False), 2) == [{"a"}, {"b", "c"}]


def test_least_latency_takes_as_few_shards_as_the_slowest_one_allows() -> None:
    assert on(named_plan("latency", FACTS, 4, None, False), 4) == [set(FACTS), set(), set(), set()]
    roomy = named_plan("latency", FACTS, 4, 64 * 110, False)
    assert [bool(own) for own in on(roomy, 4)] == [True, True, True, False]
    heavy = facts(a=(100, 900.0, 0), b=(60, 800.0, 0), c=(50, 1.0, 0))
    assert on(named_plan("latency", heavy, 3, None, False), 3) == [{"a"}, {"b", "c"}, set()]
    with pytest.raises(UserError, match="no shard has so much left"):
        named_plan("latency", FACTS, 2, 64 * 110, False)


def test_least_latency_goes_by_the_load_and_its_link() -> None:
    """What is asked for once a request weighs little, and where all share one core, parts gain nothing."""
    heavy = facts(a=(100, 900.0, 0), b=(60, 800.0, 0), c=(50, 300.0, 0))

    def used(**load: Any) -> int:
        return sum(
            map(bool, on(named_plan("latency", heavy, 3, None, False, 0, Costs(load=Load(**load))), 3))
        )

    assert used(rate=1.0) == 3
    assert used(rate=1.0, cores=1) == 1
    assert used(rate=1.0, shared=("a", "b", "c")) == 1


def test_more_shards_than_tables_hold_nothing_or_rows() -> None:
    whole = named_plan("capacity", FACTS, 8, None, False)
    assert sorted(held(whole, 8)) == [0, 0, 0, 30, 40, 50, 60, 100]
    cut = named_plan("capacity", FACTS, 8, None, True)
    assert max(held(cut, 8)) <= 50
    for name, own in cut.items():
        ends = np.cumsum([0, *(rows for _, _, rows in own)])
        assert [first for _, first, _ in own] == ends[:-1].tolist()
        assert ends[-1] == FACTS[name].info.rows


def test_memory_cuts_what_does_not_fit_and_is_never_exceeded() -> None:
    parts = named_plan("load", FACTS, 7, 64 * 50, False)
    assert {name: len(own) for name, own in parts.items()} == {"a": 2, "b": 2, "c": 1, "d": 1, "e": 1}
    assert max(held(parts, 7)) <= 50
    with pytest.raises(UserError, match="no shard has so much left: give more shards, or memory="):
        named_plan("capacity", FACTS, 2, 64 * 50, False)


def test_what_stays_at_the_main_server_is_looked_up_most_for_its_bytes() -> None:
    parts = named_plan("capacity", FACTS, 2, None, False, main=64 * 105)
    assert on(parts, 3)[2] == {"b", "d"}
    unmeasured = facts(a=(9, None, 0), b=(5, None, 0), c=(6, None, 0))
    assert on(named_plan("capacity", unmeasured, 1, None, False, main=64 * 11), 2) == [{"a"}, {"b", "c"}]
    assert on(named_plan("capacity", FACTS, 1, None, False, main=1 << 30), 2) == [set(), set(FACTS)]


def test_the_load_of_a_part_is_that_of_its_rows() -> None:
    counts = np.array([0, 1, 9]), np.array([70, 20, 10])
    own = TableFacts(TableInfo("t", 10, 4, True, ("t",)), 16, 0, 2.0, counts)
    assert own.load(0, 10) == 2 * 64
    assert own.load(0, 5) == pytest.approx(0.9 * 2 * 64)
    assert own.load(5, 5) == pytest.approx(0.1 * 2 * 64)
    with pytest.raises(UserError, match="does not say how often table 'x' is looked up"):
        named_plan("load", facts(x=(9, None, 0)), 1, None, False)


def test_any_planner_of_trainings_slot_plans_shards() -> None:
    """TorchRec's own, by limits alone."""

    class Whole(Planner):
        def constrain(self, table: TableInfo) -> Any:
            from torchrec.distributed.planner import ParameterConstraints

            return ParameterConstraints(sharding_types=["table_wise"])

    parts = planned(Whole(), facts(a=(100, 1.0, 0), b=(60, 1.0, 0)), 2, 1 << 30)
    assert on(parts, 2) in ([{"a"}, {"b"}], [{"b"}, {"a"}])


def test_a_plan_comes_back_from_its_file_and_wrong_ones_are_refused(tmp_path: Path) -> None:
    parts, file = named_plan("capacity", FACTS, 2, None, True), tmp_path / "plan.json"
    content = plan_content(parts, 2)
    file.write_text(json.dumps(content))
    assert {n: [*map(tuple, own)] for n, own in read_plan(file, FACTS, 2).items()} == dict(parts)
    tables = content["tables"]
    for changed, why in (
        ({"shards": 3}, "is of 3 shards, and shards=2"),
        ({"tables": {**tables, "z": [[0, 0, 1]]}}, "of other tables"),
        ({"tables": {**tables, "c": [[0, 1, 50]]}}, "each row of table 'c' once"),
        ({"tables": {**tables, "c": [[3, 0, 50]]}}, "each row of table 'c' once"),
        ({"tables": {**tables, "c": [[0, 0, 49]]}}, "49 rows of table 'c', which has 50"),
        ({"format": "x"}, "format"),
    ):
        file.write_text(json.dumps(content | changed))
        with pytest.raises(UserError, match=why):
            read_plan(file, FACTS, 2)
    with pytest.raises(UserError, match="plan=capacty is unknown"):
        named_plan("capacty", FACTS, 2, None, False)


def test_runs_are_lookups_of_one_pooling_and_as_many_bags() -> None:
    sums, mean, rows = (TableLookup("t", how, False) for how in ("sum", "mean", "none"))
    own, bags = [sums, sums, sums, mean, rows, rows], [4, 4, 2, 2, 2, 2]
    assert [(run.start, run.stop) for run in runs(own, bags)] == [(0, 2), (2, 3), (3, 4), (4, 5), (5, 6)]
    assert not list(runs([], []))


def test_parts_of_a_table_on_one_shard_are_one() -> None:
    assert joined([(1, 10, 10), (0, 20, 5), (0, 0, 10)]) == [(0, 0, 15), (1, 15, 10)]
    assert joined([(0, 0, 3), (2, 3, 4)]) == [(0, 0, 3), (2, 3, 4)]
    one = facts(a=(100, 1.0, 0), b=(10, 1.0, 0))
    parts = named_plan("capacity", one, 2, 64 * 60, False)
    for own in parts.values():
        assert len({shard for shard, *_ in own}) == len(own)


def test_the_hottest_rows_are_those_looked_up_most_for_their_bytes() -> None:
    made = facts(a=(9, 1.0, 0), b=(9, 1.0, 0), c=(9, 1.0, 0))
    wide = replace(made["b"], row_bytes=256, counts=(np.array([1, 2]), np.array([30, 100])))
    made |= {"a": replace(made["a"], counts=(np.array([3, 5, 8]), np.array([9, 2, 7]))), "b": wide}
    order = [("b", 2), ("a", 3), ("b", 1), ("a", 8), ("a", 5)]  # 100 / 264, 9 / 72, 30 / 264, 7 / 72, ...
    for count in range(6):
        room = sum({"a": 72, "b": 264}[name] for name, _ in order[:count])
        found = hottest(made, room)
        assert {(name, int(row)) for name, rows in found.items() for row in rows} == {*order[:count]}
        assert all((np.diff(rows) > 0).all() for rows in found.values())
    assert hottest(facts(a=(9, 1.0, 0)), 10**6) == {}
