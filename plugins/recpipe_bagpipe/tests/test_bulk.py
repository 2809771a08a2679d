"""The bulk store: whatever is announced and written in whatever order, the newest record is read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from recpipe_bagpipe.bulk import BulkStore

from recpipe.plugin.store import ColdStore, Records, Rows, StoreLayout
from recpipe.tables.stores.local import HostStore
from recpipe.tables.stores.ssd import SsdStore

LAYOUT = StoreLayout(("a", "b"), (300, 200), 6)


def first_records(table: str, start: int, stop: int) -> Records:
    """Records that tell their table and row."""
    rows = np.arange(start, stop) + (300 if table == "b" else 0)
    return np.repeat(rows[:, None], LAYOUT.width, 1).astype(np.float32)


def make(kind: str, path: Path) -> ColdStore:
    """An inner store of each kind."""
    if kind == "ssd":
        return SsdStore.create(LAYOUT, first_records, path / "store")
    return HostStore(LAYOUT, first_records)


def read(store: ColdStore, rows: Rows) -> Records:
    """The store's records of ``rows``."""
    out = np.full((len(rows), LAYOUT.width), np.nan, np.float32)
    store.gather(rows, out)
    return out


def values(rows: Rows, value: float) -> Records:
    """The same value in all records."""
    return np.full((len(rows), LAYOUT.width), value, np.float32)


class Gated(HostStore):
    """A store whose reads wait until they are let through, and that can be told to fail."""

    def __init__(self) -> None:
        super().__init__(LAYOUT, first_records)
        self.open = threading.Event()
        self.started = threading.Event()
        self.fault: Exception | None = None

    def gather(self, rows: Rows, out: Records) -> None:
        """As the host store, later."""
        self.started.set()
        assert self.open.wait(30)
        if self.fault:
            raise self.fault
        super().gather(rows, out)

    def scatter(self, rows: Rows, records: Records) -> None:
        """As the host store, or the fault."""
        if self.fault:
            raise self.fault
        super().scatter(rows, records)


@pytest.mark.parametrize("kind", ["host", "ssd"])
@pytest.mark.parametrize("write_rows", [1, pytest.param(7, marks=pytest.mark.soak), 40, 1000])  # 7 as 40
def test_random_calls_equal_a_plain_array(kind: str, write_rows: int, tmp_path: Path) -> None:
    random = np.random.default_rng(write_rows)
    store = BulkStore(make(kind, tmp_path), write_rows)
    truth = np.repeat(np.arange(500.0, dtype=np.float32)[:, None], LAYOUT.width, 1)
    for value in range(1, 150):
        rows = random.permutation(500)[: random.integers(0, 60)]
        action = random.choice(["announce", "scatter", "gather", "flush"], p=[0.3, 0.35, 0.33, 0.02])
        if action == "announce":
            store.announce(rows)
        elif action == "scatter":
            truth[rows] = -value
            store.scatter(rows, truth[rows])
        elif action == "gather":
            assert np.array_equal(read(store, rows), truth[rows])
        else:
            store.flush()
    assert np.array_equal(read(store, np.arange(500)), truth)
    store.flush()
    assert np.array_equal(read(store.inner, np.arange(500)), truth)
    store.close()


def test_announced_rows_are_read_once_and_serve_repeated_gathers() -> None:
    store = BulkStore(make("host", Path()), 100)
    rows = np.array([9, 3, 400])
    store.announce(rows)
    for _ in range(2):
        assert np.array_equal(read(store, rows)[:, 0], rows)
    assert (store.missed, store.io.rows_read, store.background().rows_read) == (0, 0, 3)
    assert read(store, np.array([3, 8]))[:, 0].tolist() == [3, 8]
    assert (store.missed, store.io.rows_read) == (1, 1)
    store.close()


def test_a_write_while_its_group_is_read_is_not_lost() -> None:
    inner = Gated()
    store = BulkStore(inner, 100)
    rows = np.array([1, 2])
    store.announce(rows)
    assert inner.started.wait(30)
    store.scatter(rows[:1], values(rows[:1], -5))
    inner.open.set()
    assert read(store, rows)[:, 0].tolist() == [-5, 2]
    store.flush()
    assert read(store, rows)[:, 0].tolist() == [-5, 2]
    store.close()


def test_a_write_after_its_group_has_landed_wins_after_the_flush_too() -> None:
    store = BulkStore(make("host", Path()), 100)
    rows = np.array([1, 2])
    store.announce(rows)
    read(store, rows)
    store.scatter(rows, values(rows, -5))
    assert (read(store, rows) == -5).all()
    store.flush()
    assert (read(store, rows) == -5).all()
    store.close()


def test_a_group_that_is_announced_after_a_write_sees_it() -> None:
    inner = Gated()
    inner.open.set()
    store = BulkStore(inner, 2)
    rows = np.array([1, 2])
    store.scatter(rows, values(rows, -5))
    store.scatter(rows + 10, values(rows, -6))  # which starts the first write
    store.announce(rows)
    assert (read(store, rows) == -5).all()
    assert store.missed == 0
    store.close()


def test_announced_rows_that_wait_to_be_written_are_not_read() -> None:
    store = BulkStore(make("host", Path()), 100)
    store.scatter(np.array([1, 2]), values(np.array([1, 2]), -5))
    store.announce(np.array([2, 3]))
    assert read(store, np.array([2, 3]))[:, 0].tolist() == [-5, 3]
    assert store.background().rows_read == 1
    store.close()


def test_a_row_is_written_when_the_block_around_it_has_been_read(tmp_path: Path) -> None:
    store = BulkStore(make("ssd", tmp_path), 100)
    near, far = np.array([1]), np.array([299])  # the block of row 5, and another one
    store.scatter(np.concatenate((near, far)), values(np.zeros(2, np.int64), -5))
    store.announce(np.array([0, 5]))
    assert read(store, np.array([0, 5]))[:, 0].tolist() == [0, 5]
    assert (store.background().rows_written, store.background().rows_staged) == (1, 1)
    assert (read(store.inner, near) == -5).all()
    assert (read(store.inner, far) == 299).all()
    store.flush()
    assert (read(store.inner, far) == -5).all()
    store.close()


class Replacing(HostStore):
    """A store with all rows in one block, in which a row is replaced, by ``then``, while others are read."""

    shares_blocks = True

    def __init__(self) -> None:
        super().__init__(LAYOUT, first_records)
        self.then: Callable[[], None] = lambda: None

    def gather(self, rows: Rows, out: Records) -> None:
        """As the host store; then something else happens."""
        super().gather(rows, out)
        then, self.then = self.then, lambda: None
        then()

    def staged(self, rows: Rows) -> NDArray[np.bool_]:
        """All rows."""
        return np.ones(len(rows), bool)


@pytest.mark.parametrize("replaced", [1, 2], ids=["waited to be written", "was read"])
def test_a_row_that_is_replaced_while_its_group_is_read_and_then_written_is_new(replaced: int) -> None:
    inner = Replacing()
    store = BulkStore(inner, 100)
    row = np.array([replaced])
    store.scatter(np.array([1]), values(np.array([1]), -1))
    inner.then = lambda: store.scatter(row, values(row, -5))
    store.announce(np.array([0, 1, 2, 3]))
    expected = {0: 0.0, 1: -1.0, 2: 2.0, 3: 3.0} | {replaced: -5.0}
    assert read(store, np.array([0, 1, 2, 3]))[:, 0].tolist() == list(expected.values())
    assert store.background().rows_written == (1 if replaced == 1 else 2), "none waits"
    store.close()


def test_rows_do_not_wait_where_waiting_saves_nothing() -> None:
    store = BulkStore(make("host", Path()), 8 * 10)
    store.scatter(np.arange(10), values(np.arange(10), -5))
    assert store._writing is None
    store.scatter(np.arange(10, 12), values(np.arange(2), -5))
    assert store._writing is not None
    store._writing.result()
    assert store.background().rows_written == 10
    store.close()


def test_memory_grows_with_the_rows_on_their_way() -> None:
    store = BulkStore(make("host", Path()), 10)
    store.announce(np.arange(50))
    read(store, np.arange(50))
    assert store.overhead_bytes - store.inner.overhead_bytes == store.peak_bytes
    assert store.peak_bytes == 50 * (24 + 8) + 10 * (24 + 4 + 1)
    store.close()


def test_a_row_of_two_groups_survives_the_older_one() -> None:
    store = BulkStore(make("host", Path()), 100)
    older, *_ = (store.announce(np.array(rows)) for rows in ([1, 2], [2, 3], [4, 5]))
    store.retire(older)
    store.retire(older)
    assert read(store, np.array([2, 3, 4, 5]))[:, 0].tolist() == [2, 3, 4, 5]
    assert store.missed == 0
    assert read(store, np.array([1]))[0, 0] == 1
    assert store.missed == 1
    store.close()


def test_a_row_is_written_once_however_often_it_was_replaced() -> None:
    store = BulkStore(make("host", Path()), 100)
    rows = np.array([5, 4])
    for value in range(4):
        store.scatter(rows, values(rows, value))
    store.flush()
    assert store.background().rows_written == 2
    assert (read(store.inner, rows) == 3).all()
    store.close()


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_fault_of_the_thread_surfaces_at_a_later_call(operation: str) -> None:
    inner = Gated()
    inner.open.set()
    store = BulkStore(inner, 2)
    inner.fault = OSError("disk gone")
    rows = np.array([1, 2])
    if operation == "read":
        store.announce(rows)
        with pytest.raises(OSError, match="disk gone"):
            read(store, rows)
    else:
        store.scatter(rows, values(rows, 1))
        with pytest.raises(OSError, match="disk gone"):
            store.flush()
    with pytest.raises(OSError, match="disk gone"):
        store.scatter(rows, values(rows, 2))


def test_close_writes_what_waits_and_twice_is_once(tmp_path: Path) -> None:
    store = BulkStore(make("ssd", tmp_path), 1000)
    rows = np.array([7, 450])
    store.scatter(rows, values(rows, -1))
    store.close()
    store.close()
    again = SsdStore.open(tmp_path / "store")
    assert (read(again, rows) == -1).all()
    again.close()


def test_close_after_a_failed_write_ends_and_raises_it() -> None:
    inner = Gated()
    inner.open.set()
    store = BulkStore(inner, 10)
    store.scatter(np.array([1]), values(np.array([1]), 1))
    inner.fault = OSError("disk gone")
    with pytest.raises(OSError, match="disk gone"):
        store.close()
