"""The collections of several groups as one: rows, placement, figures, and their stores' directories."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from recpipe.common.files import lock_run_dir
from recpipe.common.saved import Damaged
from recpipe.errors import StoreError, UserError
from recpipe.plugin.collection import TableCollection
from recpipe.tables.collection import SavesPlacement
from recpipe.tables.group_rows import GroupTables
from recpipe.tables.grouped import GroupedCollection
from recpipe.tables.resident import ResidentCollection
from recpipe.tables.stores.home import STATE, remove_crashed
from recpipe.tables.tiers.tiered import TieredEmbeddingBagCollection
from tests.processes import Child
from tests.tables.grouped import built, config, contents, ids, model_tables, stores, train
from tests.tables.samples import CPU

GROUPS = len(model_tables().groups)
DIRECTORIES = {f"tiers/group-{number}" for number in range(GROUPS)}


@pytest.fixture
def run_dir(tmp_path: Path):
    with lock_run_dir(tmp_path / "run") as held:
        yield held


def alike(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(values, other[name]) for name, values in one.items()
    )


# -- rows ------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["resident", "lru"])
def test_every_row_of_every_table_is_read_and_written(policy: str, run_dir) -> None:
    tables = model_tables()
    grouped = built(tables, config(policy=policy), run_dir)
    shapes = tables.shapes()
    covered = {name: np.zeros(rows, int) for name, (rows, _, _) in shapes.items()}
    for region in grouped.regions():
        covered[region.table][region.start : region.stop] += 1
        assert (region.left, region.right) == (0, shapes[region.table][1])
    assert all((times == 1).all() for times in covered.values())
    train(grouped, 3)
    rng, written = np.random.default_rng(1), contents(grouped)
    for region in grouped.regions():
        if region.table in ("few", "seen", "shops"):
            values = tuple(rng.random(part.shape, np.float32) for part in grouped.read(region))
            grouped.write(region, values)  # type: ignore[arg-type]
            written[region.table][region.start : region.stop] = np.concatenate(values, axis=1)
    assert alike(contents(grouped), written), "no other table has changed"
    rows = grouped.collections[-1].lookup(ids(4, 1).permute([4, 5]))  # type: ignore[attr-defined]
    expected = written["shops"][ids(4, 1).permute([4, 5]).values()][:, :8]
    np.testing.assert_array_equal(rows.detach().numpy(), expected)
    grouped.close()


@pytest.mark.parametrize("store", ["host", "ssd"])
@pytest.mark.parametrize("policy", ["nocache", "lru", "lfu"])
def test_tiers_of_groups_are_resident_groups(policy: str, store: str, run_dir) -> None:
    """Bit for bit; rows that are not pooled FBGEMM adds up in another order where a table is a whole one."""
    tables = model_tables()
    whole = GroupedCollection(tables, [ResidentCollection(g.tables, CPU) for g in tables.groups])
    grouped = built(tables, config(store, policy), run_dir)
    for each in (whole, grouped):
        train(each, 6)
    mine, theirs = contents(grouped), contents(whole)
    np.testing.assert_allclose(mine.pop("shops"), theirs.pop("shops"), rtol=1e-6, atol=1e-6)
    assert alike(mine, theirs)
    train(grouped, 1, first=6)
    assert all(
        not np.array_equal(values, theirs[name])
        for name, values in contents(grouped).items()
        if name in theirs
    )
    grouped.close()


def test_the_budget_is_divided_by_the_groups_bytes(run_dir) -> None:
    tables = model_tables()
    grouped = built(tables, config(budget=tables.total_bytes // 2), run_dir)
    for group, collection in zip(tables.groups, grouped.each(TieredEmbeddingBagCollection), strict=True):
        share = tables.total_bytes // 2 * group.tables.total_bytes / tables.total_bytes
        assert collection.planner.space.slots == int(share) // group.tables.record_bytes
    figures = grouped.tier_figures()
    assert figures is not None
    assert 0.45 * tables.total_bytes < figures.resident_bytes <= tables.total_bytes // 2
    grouped.close()


def test_a_budget_that_leaves_a_group_no_row_is_refused_by_the_tables_name(run_dir) -> None:
    with pytest.raises(
        UserError, match=r"tiers.resident_bytes=1000 leaves not even one row of few, of 20 bytes"
    ):
        built(model_tables(), config(budget=1000), run_dir)


# -- what it offers --------------------------------------------------------------------------


def test_it_offers_what_all_of_its_collections_can_do_together(run_dir) -> None:
    tables = model_tables()
    tiered = built(tables, config(), run_dir)
    assert tiered.offers(SavesPlacement) is tiered
    assert [tables.moves for tables in tiered.groups] == [True] * GROUPS
    assert tiered.offers(GroupTables) is None, "each group is planned by itself"
    assert not any(tables.sends for tables in tiered.groups)
    mixed = [ResidentCollection(tables.groups[0].tables, CPU), *tiered.collections[1:]]
    some = GroupedCollection(tables, mixed)
    assert some.offers(SavesPlacement) is some, "a checkpoint has the places of those whose rows move"
    assert set(some.placement_state()) == {str(n) for n in range(1, GROUPS)}
    assert [tables.moves for tables in some.groups] == [False] + [True] * (GROUPS - 1)
    tiered.close()


def test_several_groups_are_not_served_to_other_ranks(run_dir) -> None:
    with pytest.raises(UserError, match="in 5 groups.*serves one: leave topology.embedding_ranks out"):
        built(model_tables(), config(policy="resident"), run_dir).serve()


# -- placement -------------------------------------------------------------------------------


def loaded(grouped: GroupedCollection, tables: dict[str, np.ndarray]) -> GroupedCollection:
    """``grouped`` with these contents."""
    for region in grouped.regions():
        records, dim = tables[region.table][region.start : region.stop], region.right
        grouped.write(region, (records[:, :dim], records[:, dim:]))
    return grouped


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_placement_is_saved_and_loaded_group_by_group(policy: str, tmp_path: Path) -> None:
    with lock_run_dir(tmp_path / "one") as one, lock_run_dir(tmp_path / "two") as two:
        first = built(model_tables(), config(policy=policy), one)
        train(first, 5)
        state, saved = first.placement_state(), contents(first)
        assert sorted(state) == [str(number) for number in range(GROUPS)]
        second = loaded(built(model_tables(), config(policy=policy), two), saved)
        second.check_placement_state(state)
        assert second.load_placement_state(state)
        for mine, theirs in zip(_tiers(second), _tiers(first), strict=True):
            np.testing.assert_array_equal(mine.planner.row_of_slot, theirs.planner.row_of_slot)
            assert (mine.planner.row_of_slot >= 0).any()
        for each in (first, second):
            train(each, 4, first=5)
        assert alike(contents(first), contents(second))
        for mine, theirs in zip(_tiers(second), _tiers(first), strict=True):
            np.testing.assert_array_equal(mine.planner.row_of_slot, theirs.planner.row_of_slot)
        first.close()
        second.close()


def _tiers(grouped: GroupedCollection) -> list[TieredEmbeddingBagCollection]:
    return grouped.each(TieredEmbeddingBagCollection)


def test_placement_of_another_run_is_told_from_a_damaged_one(tmp_path: Path) -> None:
    with lock_run_dir(tmp_path / "one") as one, lock_run_dir(tmp_path / "two") as two:
        first = built(model_tables(), config(), one)
        train(first, 3)
        state = first.placement_state()
        other = built(model_tables(), config(budget="50%"), two)
        other.check_placement_state(state)
        assert not other.load_placement_state(state), "a run with another budget starts with no row resident"
        assert not any((tiers.planner.row_of_slot >= 0).any() for tiers in _tiers(other))
        assert not other.load_placement_state(None)
        for broken in (
            {name: part for name, part in state.items() if name != "4"},
            {**state, "4": 7},
            {**state, "2": {**state["2"], "row_of_slot": state["2"]["row_of_slot"] + 100_000}},
            {("5" if name == "4" else name): part for name, part in state.items()},
        ):
            with pytest.raises(Damaged):
                first.check_placement_state(broken)
        first.close()
        other.close()


# -- figures ---------------------------------------------------------------------------------


def test_figures_are_sums_over_the_groups(run_dir) -> None:
    grouped = built(model_tables(), config("ssd", budget="10%"), run_dir)
    train(grouped, 8)
    figures, parts = grouped.tier_figures(), [tiers.tier_figures() for tiers in _tiers(grouped)]
    assert figures is not None
    for name in ("rows_read", "rows_written", "bytes_read", "bytes_written"):
        each = [getattr(part.io, name) for part in parts]
        assert getattr(figures.io, name) == sum(each)
        assert all(each), "every group moves rows"
    for name in ("resident_bytes", "cold_bytes", "overhead_bytes"):
        assert getattr(figures, name) == sum(getattr(part, name) for part in parts)
    assert figures.times.fetch == pytest.approx(sum(part.times.fetch for part in parts))
    assert figures.direct == parts[0].direct
    grouped.close()
    assert built(model_tables(), config(policy="resident"), run_dir).tier_figures() is None


# -- the end ---------------------------------------------------------------------------------


class Closing(ResidentCollection):
    """Notes that it was closed, and may fail at it."""

    def __init__(self, closed: list[int], number: int, fault: str | None) -> None:
        super().__init__(model_tables().groups[number].tables, CPU)
        self.noted, self.number, self.fault = closed, number, fault

    def close(self) -> None:
        self.noted.append(self.number)
        if self.fault is not None:
            raise StoreError(self.fault)


def test_all_are_closed_whatever_one_of_them_raises() -> None:
    closed: list[int] = []
    faults = [None, "the first", None, "the second", None]
    parts: list[TableCollection] = [Closing(closed, number, fault) for number, fault in enumerate(faults)]
    with pytest.raises(StoreError, match="the first"):
        GroupedCollection(model_tables(), parts).close()
    assert closed == [0, 1, 2, 3, 4]


def test_each_group_has_its_own_ssd_store_which_goes_with_the_run(tmp_path: Path) -> None:
    with lock_run_dir(tmp_path) as held:
        grouped = built(model_tables(), config("ssd"), held)
        assert stores(tmp_path) == DIRECTORIES
        names = [
            json.loads((tmp_path / d / STATE).read_text())["layout"]["tables"] for d in sorted(DIRECTORIES)
        ]
        assert names == [list(group.tables.layout.tables) for group in model_tables().groups]
        train(grouped, 2)
        grouped.close()
    assert not (tmp_path / "tiers").exists()


def test_the_stores_go_after_an_error_too(tmp_path: Path) -> None:
    def fails() -> None:
        with lock_run_dir(tmp_path) as held:
            train(built(model_tables(), config("ssd"), held), 2)
            assert stores(tmp_path) == DIRECTORIES
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert not (tmp_path / "tiers").exists()


def test_a_named_place_keeps_the_stores_apart(tmp_path: Path) -> None:
    with lock_run_dir(tmp_path / "run") as held:
        grouped = built(model_tables(), config("ssd", dir=tmp_path / "mine"), held)
        train(grouped, 2)
        grouped.close()
    assert stores(tmp_path / "mine") == {f"group-{number}" for number in range(GROUPS)}
    states = [json.loads(f.read_text())["state"] for f in (tmp_path / "mine").rglob(STATE)]
    assert states == ["closed"] * GROUPS
    remove_crashed(tmp_path / "mine")
    assert len(stores(tmp_path / "mine")) == GROUPS, "what was closed in good order stays"


WRITER = """
import sys
from pathlib import Path
from recpipe.common.files import lock_run_dir
from tests.tables.grouped import built, config, model_tables, train
with lock_run_dir(Path(sys.argv[1])) as held:
    grouped = built(model_tables(), config("ssd"), held)
    step = 0
    while True:
        train(grouped, 1, first=step)
        step += 1
        if step == 3:
            print("ready", flush=True)
"""


def test_stores_of_a_killed_run_are_found_in_use_then_left_and_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, mine = tmp_path / "run", tmp_path / "run" / "tiers" / "group-1" / "notes.txt"
    process = Child(tmp_path / "writer", str(run), script=WRITER)
    try:
        process.until("ready\n")
        assert stores(run) == DIRECTORIES
        remove_crashed(run / "tiers")
        assert stores(run) == DIRECTORIES, "a live run uses them"
        with pytest.raises(UserError, match="in use by another run"), lock_run_dir(run):
            raise AssertionError("held by two")
    finally:
        process.kill()
    assert stores(run) == DIRECTORIES
    mine.write_text("mine")
    remove_crashed(run / "tiers")
    assert stores(run) == set()
    assert [str(f.relative_to(run)) for f in (run / "tiers").rglob("*.rows")] == []
    assert mine.read_text() == "mine", "what no store made stays"
    said = [
        r.getMessage() for r in caplog.records if "removed the ssd store that a killed run left" in r.message
    ]
    assert len(said) == 1
    assert f"process {process.pid}" in said[0]


def test_a_run_begins_anew_where_a_killed_one_left_its_stores(tmp_path: Path) -> None:
    process = Child(tmp_path / "writer", str(tmp_path / "run"), script=WRITER)
    process.until("ready\n")
    process.kill()
    tables = model_tables()
    with lock_run_dir(tmp_path / "run") as held:
        grouped = built(tables, config("ssd"), held)
        first = {t.name: g.tables.fill(t.name, 0, t.rows) for g in tables.groups for t in g.tables.tables}
        assert alike(contents(grouped), first)
        grouped.close()
    assert not (tmp_path / "run" / "tiers").exists()
