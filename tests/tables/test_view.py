"""Rows as plugins see them between batches: numbered over groups of different widths, wherever they lie."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from recpipe.errors import UserError
from recpipe.tables.grouped import GroupedCollection, TablesView
from recpipe.tables.groups import ModelTables
from recpipe.tables.resident import ResidentCollection
from tests.tables.grouped import contents, model_tables, train
from tests.tables.samples import CPU, SLOTS, dump, stream, table_set, tiers, train_ahead


def test_resident_tables_of_several_groups() -> None:
    tables = model_tables()
    grouped = GroupedCollection(tables, [ResidentCollection(g.tables, CPU) for g in tables.groups])
    view = TablesView(tables, grouped.collections)
    assert view.rows == view.slots == view.resident_count == tables.total_rows
    assert view.dim == 8
    np.testing.assert_array_equal(view.resident(), np.arange(view.rows))
    before, mark = weights(grouped, tables), view.mark()
    np.testing.assert_array_equal(mark.weights, before)
    train(grouped, 2)
    rows, distance = view.moved(mark)
    np.testing.assert_array_equal(rows, view.resident())
    np.testing.assert_array_equal(distance, np.abs(weights(grouped, tables) - before).max(axis=1))
    assert 0 < np.count_nonzero(distance) < len(rows)
    some = view.mark(np.array([3, 400, view.rows - 1]))
    np.testing.assert_array_equal(some.weights, weights(grouped, tables)[some.rows])


def weights(grouped: GroupedCollection, tables: ModelTables) -> np.ndarray:
    """Of all rows, with zeros behind narrow ones."""
    found, made = contents(grouped), []
    for group in tables.groups:
        for name in group.tables.layout.tables:
            own = found[name][:, : group.tables.dim]
            made.append(np.pad(own, ((0, 0), (0, 8 - own.shape[1]))))
    return np.concatenate(made)


@pytest.mark.parametrize("policy", ["lru", "hot", "nocache"])
def test_tiers_show_the_last_batch_though_the_next_one_is_planned(policy: str, tmp_path: Path) -> None:
    collection = tiers(table_set(), policy, tmp_path)
    view = TablesView(ModelTables.single(collection.tables), [collection])
    assert (view.resident_count, view.slots) == (0, 0 if policy == "nocache" else SLOTS)
    assert len(view.mark().rows) == 0
    marks = []

    def after(number: int) -> None:
        shown = view.mark()
        marks.append(shown)
        assert view.resident_count == len(shown.rows) <= view.slots
        everything = np.concatenate(list(dump(collection).values()))
        np.testing.assert_array_equal(shown.weights, everything[shown.rows][:, : collection.tables.dim])
        with collection.quiesced():
            row_of_slot = collection.planner.row_of_slot
            np.testing.assert_array_equal(shown.rows, np.sort(row_of_slot[row_of_slot >= 0]))
        rows, distance = view.moved(marks[number // 2])
        np.testing.assert_array_equal(rows, np.intersect1d(marks[number // 2].rows, shown.rows))
        old, new = (m.weights[np.searchsorted(m.rows, rows)] for m in (marks[number // 2], shown))
        np.testing.assert_array_equal(distance, np.abs(new - old).max(axis=1, initial=0))

    train_ahead(collection, stream(20, True), after=after)
    assert policy == "nocache" or view.resident_count == SLOTS
    assert policy == "nocache" or len(np.setdiff1d(marks[10].rows, marks[-1].rows)), "rows have left"
    collection.close()


def test_a_mark_is_a_copy(tmp_path: Path) -> None:
    collection = tiers(table_set(), "lru", tmp_path)
    view = TablesView(ModelTables.single(collection.tables), [collection])
    train_ahead(collection, stream(2, True))
    mark = view.mark()
    copy = mark.weights.copy()
    train_ahead(collection, stream(3, True))
    np.testing.assert_array_equal(mark.weights, copy)
    collection.close()


def test_tables_that_show_no_rows_say_so() -> None:
    class Own(ResidentCollection):
        def offers(self, capability: type) -> None:
            return None

    tables = table_set()
    view = TablesView(ModelTables.single(tables), [Own(tables, CPU)])
    with pytest.raises(UserError, match="asks which rows are resident, which Own does not show"):
        view.resident()
