"""What the tiers move and hold: traffic per batch, memory, and placements that survive a restart."""

from __future__ import annotations

from time import sleep

import numpy as np
import pytest
import torch

from recpipe.errors import StoreError
from recpipe.tables.resident import ResidentCollection
from recpipe.tables.rows import table_bags
from recpipe.tables.stores.local import HostStore
from recpipe.tables.tiers import tiered
from tests.tables.samples import (
    CPU,
    DIM,
    MAKERS,
    SLOTS,
    dump,
    identical,
    stream,
    table_set,
    tiers,
    train,
    train_ahead,
)


class Spy(HostStore):
    """Remembers which rows each call asked for."""

    def __init__(self, layout, fill) -> None:
        super().__init__(layout, fill)
        self.reads: list[np.ndarray] = []
        self.writes: list[np.ndarray] = []

    def gather(self, rows, out) -> None:
        self.reads.append(rows.copy())
        super().gather(rows, out)

    def scatter(self, rows, records) -> None:
        self.writes.append(rows.copy())
        super().scatter(rows, records)


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("policy", MAKERS)
def test_each_cold_row_moves_once_per_batch(tmp_path, policy, prefetch) -> None:
    tables = table_set()
    spy = Spy(tables.layout, tables.fill)
    collection = tiers(tables, policy, tmp_path, spy, prefetch)
    batches = stream(20, True)
    train_ahead(collection, batches)
    counted = collection.io.rows_read, collection.io.rows_written
    collection.close()
    assert len(spy.reads) == len(batches), "one gather per batch"
    assert len(spy.writes) <= len(batches) + 1, "one scatter per batch, and one for the last slab"
    for rows in (*spy.reads, *spy.writes):
        assert len(np.unique(rows)) == len(rows), "a row moves twice"
    assert counted[0] == sum(map(len, spy.reads))
    assert collection.io.rows_written == sum(map(len, spy.writes)) >= counted[1]
    distinct = [len(np.unique(table_bags(collection.tables, batch).indices)) for batch in batches]
    if policy == "nocache" and not prefetch:
        assert [len(rows) for rows in spy.reads] == distinct == [len(rows) for rows in spy.writes]
    if policy in ("nocache", "lru", "lfu"):
        assert all(len(rows) <= most for rows, most in zip(spy.reads, distinct, strict=True))
    if policy != "nocache":
        assert sum(map(len, spy.reads)) < 0.9 * sum(distinct), "the cache saves traffic"


def test_fetching_ahead_keeps_rows_that_the_next_batch_needs(tmp_path) -> None:
    read = {}
    for prefetch in (False, True):
        collection = tiers(table_set(), "nocache", tmp_path, prefetch=prefetch)
        train_ahead(collection, stream(20, True))
        read[prefetch] = collection.io.rows_read
        collection.close()
    assert read[True] < 0.9 * read[False]


@pytest.mark.parametrize("policy", [name for name in MAKERS if name != "hot"])
def test_a_restored_placement_continues_alike(tmp_path, policy) -> None:
    batches = stream(24, True)
    first, second = (tiers(table_set(), policy, tmp_path) for _ in range(2))
    train_ahead(first, batches[:12])
    for region in first.regions():
        second.write(region, first.read(region))
    assert second.load_placement_state(first.placement_state())
    np.testing.assert_array_equal(second.planner.row_of_slot, first.planner.row_of_slot)
    assert identical(dump(first), dump(second)), "residents have their records"
    before = first.io.rows_read, second.io.rows_read
    train(first, batches[12:])
    train(second, batches[12:])
    assert identical(dump(first), dump(second))
    np.testing.assert_array_equal(second.planner.row_of_slot, first.planner.row_of_slot)
    slab = len(np.unique(table_bags(first.tables, batches[11]).indices))
    read = first.io.rows_read - before[0], second.io.rows_read - before[1]
    assert read[0] <= read[1] <= read[0] + slab, "only what the slab carried is fetched again"
    first.close()
    second.close()


def test_a_placement_of_another_run_is_not_taken_over(tmp_path) -> None:
    collection = tiers(table_set(), "lru", tmp_path)
    train(collection, stream(4, True))
    state = collection.placement_state()
    for policy, slots in (("lfu", SLOTS), ("lru", SLOTS - 1), ("nocache", 0)):
        other = tiers(table_set(), policy, tmp_path, slots=slots)
        assert not other.load_placement_state(state)
        assert not (other.planner.row_of_slot >= 0).any()
        other.close()
    assert not tiers(table_set(), "lru", tmp_path).load_placement_state(None)
    collection.close()


def test_placement_state_is_a_copy(tmp_path) -> None:
    collection = tiers(table_set(), "lfu", tmp_path)
    train(collection, stream(4, True))
    state = collection.placement_state()
    counts = state["state"]["counts"].copy()
    train(collection, stream(4, True, seed=6))
    np.testing.assert_array_equal(state["state"]["counts"], counts)
    collection.close()


@pytest.mark.parametrize("store", ["host", "ssd"])
@pytest.mark.parametrize("policy", MAKERS)
def test_memory_is_what_was_allocated(tmp_path, policy, store) -> None:
    tables = table_set("adagrad")
    collection = tiers(tables, policy, tmp_path, store)
    train(collection, stream(6, True))
    slots = 0 if policy == "nocache" else SLOTS
    weights, state = collection.layout.resident.weights, collection.layout.resident.state
    assert weights.shape == state.shape == (max(1, slots), DIM)
    figures = collection.tier_figures()
    assert figures.resident_bytes == slots * 4 * (DIM + DIM)
    planner = collection.planner
    arrays = [planner.where, planner.row_of_slot, collection.occupied.rows]
    arrays += [a for a in vars(planner.policy).values() if isinstance(a, np.ndarray)]
    notes = planner.space.residents.notes
    arrays += [] if notes is None else [notes.of_slot]
    slab = collection.layout.slab.weights, collection.layout.slab.state
    assert slab[0].shape[0] >= len(planner.slab_rows)
    held = sum(a.nbytes for a in arrays) + sum(t.nbytes for t in slab) + collection.store.overhead_bytes
    assert figures.overhead_bytes == held
    assert held > 4 * tables.layout.total_rows
    collection.close()


class Slow(HostStore):
    """A store that takes 5 ms for each read."""

    def gather(self, rows, out) -> None:
        sleep(0.005)
        super().gather(rows, out)


@pytest.mark.parametrize("done", [True, False])
def test_a_wait_counts_if_the_device_has_nothing_left_to_do(tmp_path, monkeypatch, done) -> None:
    monkeypatch.setattr(tiered, "given_so_far", lambda device: lambda: done)
    tables, batches = table_set(), stream(6, True)
    collection = tiers(tables, "lru", tmp_path, Slow(tables.layout, tables.fill))
    train(collection, batches)
    waited = collection.times.wait
    assert waited > 0.004 * len(batches) if done else waited == 0
    collection.close()


class Failing(HostStore):
    """A store whose device fails from its third call of ``method`` on."""

    def __init__(self, tables, method: str) -> None:
        super().__init__(tables.layout, tables.fill)
        self.method, self.left, self.closed = method, 2, False

    def _count(self, method: str) -> None:
        if method == self.method:
            self.left -= 1
            if self.left < 0:
                raise StoreError("the device failed")

    def gather(self, rows, out) -> None:
        self._count("gather")
        super().gather(rows, out)

    def scatter(self, rows, records) -> None:
        self._count("scatter")
        super().scatter(rows, records)

    def close(self) -> None:
        self.closed = True
        super().close()


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("policy", MAKERS)
@pytest.mark.parametrize("method", ["gather", "scatter"])
def test_a_failing_store_stops_training_and_is_closed(tmp_path, method, policy, prefetch) -> None:
    store = Failing(table_set(), method)
    collection = tiers(table_set(), policy, tmp_path, store, prefetch)

    def run() -> None:
        try:
            train_ahead(collection, stream(30, True))
        finally:
            collection.close()

    with pytest.raises(StoreError, match="the device failed"):
        run()
    assert store.closed


def test_a_batch_that_is_not_trained_changes_nothing(tmp_path) -> None:
    """A callback may skip a batch: its rows have been fetched, and must not be lost."""
    collection = tiers(table_set("adagrad"), "lru", tmp_path)
    batches = stream(8, True)
    train_ahead(collection, batches)
    before = dump(collection)
    for batch in stream(4, True, seed=8):
        collection.advance(collection.input_dist(batch))
    assert identical(dump(collection), before)
    collection.close()


@pytest.mark.parametrize("policy", ["nocache", "lru"])
def test_written_back_rows_are_in_the_store_and_the_tables_go_on(tmp_path, policy) -> None:
    tables = table_set()
    spy = Spy(tables.layout, tables.fill)
    collection = tiers(tables, policy, tmp_path, spy, True)
    batches = stream(6, True)
    train_ahead(collection, batches[:5])
    collection.write_back()
    resident = collection.resident_rows()
    cold = np.setdiff1d(np.arange(tables.layout.total_rows), resident)
    stored = np.empty((len(cold), tables.layout.width), np.float32)
    spy.gather(cold, stored)
    np.testing.assert_array_equal(stored, collection.records_of(cold).numpy())
    train_ahead(collection, batches[5:])
    collection.close()


@pytest.mark.parametrize(("slots", "never_full"), [(SLOTS, False), (10_000, True)])
def test_a_cache_says_whether_it_was_ever_full(tmp_path, slots, never_full) -> None:
    collection = tiers(table_set(), "lru", tmp_path, slots=slots)
    train_ahead(collection, stream(10, True))
    assert collection.tier_figures().cold_start is never_full
    assert (collection.resident_count < slots) is never_full
    collection.close()


@pytest.mark.parametrize("policy", MAKERS)
def test_frozen_rows_are_read_and_never_written(tmp_path, policy) -> None:
    """Rows come and go for 20 batches; what is set in between is what is read, wherever a row then is."""
    tables = table_set(lr=0.0)
    assert tables.layout.width == DIM
    spy = Spy(tables.layout, tables.fill)
    collection = tiers(tables, policy, tmp_path, spy)
    whole = ResidentCollection(tables, CPU)
    batches = stream(20, True)
    rows = collection.input_dist(batches[0])
    for number, (batch, following) in enumerate(zip(batches, [*batches[1:], None], strict=True)):
        collection.advance(rows)
        ahead = None if following is None else collection.input_dist(following)
        if ahead is not None:
            collection.prefetch(ahead)
        assert torch.allclose(collection.look_up_now(rows), whole.lookup(batch), atol=1e-6)
        rows = ahead or rows
        if number == 9:
            assert spy.writes == []
            for region in collection.regions():
                values = whole.read(region)[0] + 1.0, whole.read(region)[1]
                collection.write(region, values)
                whole.write(region, values)
            spy.writes.clear()
    assert identical(dump(collection), dump(whole))
    assert (collection.io.rows_read > 0, collection.io.bytes_written) == (True, 0)
    collection.close()
    assert spy.writes == []
