"""Tiered rows: every batch finds the bytes that all rows in DRAM would give it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from recpipe_sdm.admission import Admission
from recpipe_sdm.index import EMPTY, PRUNED, RowIndex, elsewhere
from recpipe_sdm.rows import Shared, TieredRows
from recpipe_sdm.tiers import Tiers

from recpipe.errors import StoreError
from recpipe.plugin import RowIds
from recpipe.plugin.store import StoreLayout
from recpipe.tables.stores.ssd import SsdStore

ROWS, WORDS, BATCH = 3000, 5, 400
Bytes = NDArray[np.uint8]


@pytest.fixture
def table() -> Bytes:
    """Random bytes: also such that are no numbers as float32."""
    return np.random.default_rng(1).integers(0, 256, (ROWS, 4 * WORDS), np.uint8)


@pytest.fixture
def store(table: Bytes, tmp_path: Path) -> SsdStore:
    layout = StoreLayout(("users", "items"), (2000, 1000), WORDS)

    def fill(name: str, start: int, stop: int) -> NDArray[np.float32]:
        first = 0 if name == "users" else 2000
        return table[first + start : first + stop].view(np.float32)

    return SsdStore.create(layout, fill, tmp_path, scratch=True)


def batches(count: int, drift: int = 0) -> Iterator[RowIds]:
    """Skewed lookups; the popular rows move on by ``drift`` with every batch."""
    rng = np.random.default_rng(2)
    for number in range(count):
        yield (rng.zipf(1.2, BATCH) + drift * number) % ROWS


def tiers_of(
    store: SsdStore,
    hot: RowIds,
    room: int,
    admission: Admission | None = None,
    pruned: RowIds | None = None,
) -> Tiers:
    """A single one."""
    shared = Shared(RowIndex(ROWS, pruned, admission is not None), admission)
    return Tiers(shared, [TieredRows(shared, store, hot, room)])


@contextmanager
def found(tiers: Tiers, rows: RowIds) -> Iterator[torch.Tensor]:
    """Their places."""
    with tiers.found(tiers.look(rows)) as places:
        yield torch.from_numpy(places)


def bytes_of(tiers: Tiers, rows: RowIds) -> Bytes:
    with found(tiers, rows) as places:
        return tiers.tiers[0].buffer[places].numpy().copy()


def wrong_batches(tiers: Tiers, table: Bytes, count: int = 60, drift: int = 3) -> int:
    """How many batches do not find their rows' bytes, while another thread reads ahead what some of them and
    others, which never come, look up."""
    wrong, ended = 0, threading.Event()

    def read_ahead() -> None:
        rng = np.random.default_rng(5)
        while not ended.is_set():
            for ids in batches(count, drift):
                tiers.ahead(tiers.look(ids if rng.random() < 0.7 else rng.integers(0, ROWS, 50)))

    reader = threading.Thread(target=read_ahead)
    reader.start()
    try:
        for ids in batches(count, drift):
            wrong += not np.array_equal(bytes_of(tiers, ids), table[ids])
    finally:
        ended.set()
        reader.join()
        tiers.close()
    return wrong


@pytest.mark.parametrize("slots", [0, 1, 500, ROWS])
@pytest.mark.parametrize("adapts", [False, True])
def test_a_batch_finds_its_rows(slots: int, adapts: bool, store: SsdStore, table: Bytes) -> None:
    tiers = tiers_of(store, np.arange(slots), ROWS - slots, Admission(slots, every=4) if adapts else None)
    assert wrong_batches(tiers, table) == 0
    reads = tiers.shared.reads
    assert (reads.missed == 0) == (slots == ROWS)
    assert reads.lookups == 60 * BATCH
    assert (reads.admitted > 0) == (adapts and 1 <= slots < ROWS)
    assert bool(reads.rows_ahead) == (slots < ROWS)


def test_a_place_that_is_given_away_must_be_forgotten(
    store: SsdStore, table: Bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: the index still names the ring's places after others have got them."""
    monkeypatch.setattr(RowIndex, "forget", lambda index, rows: None)
    assert wrong_batches(tiers_of(store, np.arange(500), BATCH), table)


def during_a_lookup(tiers: Tiers, rows: RowIds, change: Callable[[], None]) -> Bytes:
    """What a lookup finds while another thread makes a ``change``."""
    other = threading.Thread(target=change)
    with found(tiers, rows) as places:
        other.start()
        other.join(0.3)
        seen = tiers.tiers[0].buffer[places].numpy().copy()
    other.join()
    return seen


class Unlocked:
    """A lock that keeps nobody out."""

    def __new__(cls) -> AbstractContextManager[None]:  # type: ignore[misc]
        return nullcontext()


@pytest.mark.parametrize("locked", [True, False])
@pytest.mark.parametrize("what", ["replaced", "admitted"])
def test_rows_do_not_change_during_a_lookup(what: str, locked: bool, store: SsdStore, table: Bytes) -> None:
    """Without the lock they do."""
    tiers = tiers_of(store, np.arange(500), BATCH)
    (tier,) = tiers.tiers
    if not locked:
        tiers.shared.using = Unlocked()  # type: ignore[assignment]
    rows = np.arange(100)
    changes = {
        "replaced": lambda: tier.replace(rows, 255 - table[rows]),
        "admitted": lambda: tier.admit(rows + 1000, rows),
    }
    seen = during_a_lookup(tiers, rows, changes[what])  # type: ignore[arg-type]
    assert np.array_equal(seen, table[rows]) == locked
    after = 255 - table[rows] if what == "replaced" else table[rows]
    assert np.array_equal(bytes_of(tiers, rows), after)
    tiers.close()


def test_what_was_read_ahead_and_never_scored_takes_no_more_room(store: SsdStore, table: Bytes) -> None:
    tiers = tiers_of(store, np.arange(500), ROWS - 500)
    (tier,) = tiers.tiers
    rng = np.random.default_rng(3)
    for _ in range(100):
        tiers.ahead(tiers.look(rng.integers(500, ROWS, 20)))
    assert tier.ring.size <= 4 * 20
    at = tiers.shared.index.find(np.arange(500, ROWS))[0]
    assert 0 < int((at >= 500).sum()) <= tier.ring.size
    assert len(np.unique(at[at >= 0])) == int((at >= 0).sum()), "no two rows have the same place"
    assert np.array_equal(bytes_of(tiers, np.arange(500, 900)), table[500:900])
    tiers.close()


def test_a_row_that_is_replaced_after_it_was_read_ahead_is_the_new_one(store: SsdStore, table: Bytes) -> None:
    tiers = tiers_of(store, np.arange(500), BATCH)
    (tier,) = tiers.tiers
    rows = np.arange(900, 1000)
    tiers.ahead(tiers.look(rows))
    assert tier.replace(rows, 255 - table[rows]) == 100
    assert np.array_equal(bytes_of(tiers, rows), 255 - table[rows])
    tiers.close()


@pytest.mark.parametrize("counted", [True, False])
def test_rows_that_get_slots_after_a_look_are_found_there(
    counted: bool, store: SsdStore, table: Bytes
) -> None:
    """And those that lost theirs are read. Not if nobody says that slots have changed."""
    tiers, rows = tiers_of(store, np.arange(500), BATCH), np.array([3, 3, 700, 900, 499])
    (tier,) = tiers.tiers
    look = tiers.look(rows)
    tiers.ahead(look)
    tier.admit(np.array([700, 901]), np.array([3, 499]))
    if not counted:
        tiers.shared.index.version -= 1
    with tiers.found(look) as places:
        seen = tier.buffer[torch.from_numpy(places)].numpy().copy()
    assert np.array_equal(seen, table[rows]) == counted
    tiers.close()


def test_rows_that_lose_their_slots_once_others_were_read_are_read_too(
    store: SsdStore, table: Bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers, read = tiers_of(store, np.arange(500), BATCH), TieredRows.read
    rows, exchanges = np.array([3, 700, 499]), [(np.array([900]), np.array([3]))]

    def read_and_exchange(own: TieredRows, missing: RowIds) -> None:
        read(own, missing)
        if exchanges:
            own.admit(*exchanges.pop())

    monkeypatch.setattr(TieredRows, "read", read_and_exchange)
    assert np.array_equal(bytes_of(tiers, rows), table[rows])
    assert not exchanges
    tiers.close()


def test_a_row_that_had_a_slot_meanwhile_is_not_taken_from_where_it_was_read_before(
    store: SsdStore, table: Bytes
) -> None:
    """It was replaced while it had the slot."""
    tiers, row = tiers_of(store, np.arange(500), BATCH), np.array([700])
    (tier,) = tiers.tiers
    assert np.array_equal(bytes_of(tiers, row), table[row])
    tier.admit(row, np.array([3]))
    assert tier.replace(row, 255 - table[row]) == 1
    tier.admit(np.array([3]), row)
    assert np.array_equal(bytes_of(tiers, row), 255 - table[row])
    tiers.close()


def test_rows_that_change_while_they_are_read_are_read_again(store: SsdStore, table: Bytes) -> None:
    tiers = tiers_of(store, np.arange(500), BATCH)
    (tier,) = tiers.tiers
    rows = np.arange(900, 1000)
    scatter = store.scatter

    def read_meanwhile(own: RowIds, records: NDArray[np.float32]) -> None:
        tiers.ahead(tiers.look(rows))
        tier.land()
        scatter(own, records)

    store.scatter = read_meanwhile  # type: ignore[method-assign]
    assert tier.replace(rows, 255 - table[rows]) == 100
    assert tiers.shared.reads.rows_ahead == 0
    assert np.array_equal(bytes_of(tiers, rows), 255 - table[rows])
    tiers.close()


def test_popular_rows_get_slots(store: SsdStore) -> None:
    """The rows that are in DRAM at first are looked up by nobody."""
    tiers = tiers_of(store, np.arange(ROWS - 500, ROWS), BATCH, Admission(500, every=4))
    shares = []
    for number, ids in enumerate(batches(80)):
        shares.append(len(tiers.look(ids).cold) / BATCH)
        bytes_of(tiers, ids)
        assert tiers.change is None or tiers.change.result(10) is None
        assert len(tiers.shared.index.slotted(0, ROWS)) == 500, number
    assert np.mean(shares[:4]) > 0.8
    assert np.mean(shares[-20:]) < 0.35
    tiers.close()


def test_counts_of_before_keep_rows_that_nobody_looks_up_yet(store: SsdStore) -> None:
    """Rows 0 to 499 were looked up a thousand times in training, missed ones a few times in serving."""
    index = RowIndex(ROWS, changes=True)
    index.change(np.arange(500), np.arange(500, dtype=np.int32), np.empty(0, np.int64))
    for known in (True, False):
        admission = Admission(500, every=4)
        if known:
            admission.before(np.arange(500), np.full(500, 1000))
        admission.note(np.full(5, 700), np.full(5, 700))
        entering, leaving = admission.exchange(admission.begin(), index, 0, ROWS, 500)
        assert entering.tolist() == ([] if known else [700])
        assert len(leaving) == len(entering)


def test_an_index_says_where_each_row_is() -> None:
    """As an array with a number for every row does, after any changes."""
    rng, pruned = np.random.default_rng(4), np.array([5, 64, 95, 99])
    index, plain = RowIndex(100, pruned, changes=True), np.full(100, EMPTY)
    plain[pruned] = PRUNED
    slots, ring = {}, {}  # by row
    for _ in range(300):
        free = [row for row in range(100) if row not in slots and row not in pruned]
        entering = rng.permutation(free)[: rng.integers(0, 20)]
        leaving = rng.permutation(np.array(list(slots), np.int64))[: rng.integers(0, 20)]
        given = rng.integers(0, 1000, len(entering)).astype(np.int32)
        index.change(entering, given, leaving)
        for row in leaving.tolist():
            del slots[row]
        slots |= dict(zip(entering.tolist(), given.tolist(), strict=True))
        ring = {row: at for row, at in ring.items() if row not in slots}
        gone = rng.integers(0, 100, 10)
        index.forget(gone)
        ring = {row: at for row, at in ring.items() if row not in gone}
        read = np.array([row for row in rng.permutation(100)[:8] if row not in slots and row not in pruned])
        at = rng.integers(1000, 2000, len(read)).astype(np.int32)
        index.hold(read.astype(np.int64), at)
        ring |= dict(zip(read.tolist(), at.tolist(), strict=True))
        rows = rng.integers(0, 100, 60)
        places, cold = index.find(rows)
        expected = [slots.get(row, ring.get(row, int(plain[row]))) for row in rows.tolist()]
        assert places.tolist() == expected
        assert cold.tolist() == [i for i, row in enumerate(rows) if row not in slots and row not in pruned]
        assert index.slotted(0, 100).tolist() == sorted(slots)
    with pytest.raises(IndexError):
        index.find(np.array([100]))
    mixed = np.concatenate([elsewhere(np.array([-1, 0, 7])), rows[:3]])
    assert index.find(mixed)[0].tolist() == [-1, 0, 7, *places[:3].tolist()]


def test_an_index_takes_a_quarter_of_a_byte_for_a_row_without_a_slot() -> None:
    index = RowIndex(1 << 20)
    index.change(np.arange(0, 1 << 20, 64), np.arange(1 << 14, dtype=np.int32), np.empty(0, np.int64))
    assert index.nbytes == (1 << 20) // 4 + 4 * (1 << 14)


def test_counts_are_close_for_rows_that_are_looked_up_often() -> None:
    """500 slots, 20,000 rows: the 500 rows with the highest counts have nearly as many lookups as any."""
    rng, admission = np.random.default_rng(6), Admission(500)
    rows = (rng.zipf(1.3, 200_000) * 7919) % 20_000
    exact = np.bincount(rows, minlength=20_000)
    for part in np.split(rows, 50):
        admission.note(part, part[:0])
    seen = np.bincount(np.concatenate(np.split(rows, 50)[::4]), minlength=20_000) * 4
    counts = admission.counts(np.arange(20_000))
    assert (counts >= np.minimum(seen, 65535)).all(), "never below"
    top, found = np.argsort(-exact)[:500], np.argsort(-counts)[:500]
    assert exact[found].sum() > 0.9 * exact[top].sum()
    assert admission.nbytes == 8 * 500


def test_only_rows_that_differ_are_written(store: SsdStore, table: Bytes) -> None:
    """Half of the replaced rows are in DRAM, half on the SSD."""
    tiers = tiers_of(store, np.arange(500), BATCH)
    (tier,) = tiers.tiers
    rows = np.arange(300, 700)
    assert np.array_equal(bytes_of(tiers, rows), table[rows])
    written = tier.bytes_written
    assert tier.replace(rows, table[rows]) == 0
    assert tier.bytes_written == written
    new = table[rows].copy()
    new[::100] = 255 - new[::100]
    assert tier.replace(rows, new) == 4
    assert 0 < tier.bytes_written - written <= 4 * 4096
    assert np.array_equal(bytes_of(tiers, rows), new)
    tiers.close()


def test_pruned_rows_have_no_place_and_are_never_read(store: SsdStore) -> None:
    tiers = tiers_of(store, np.arange(500), BATCH, Admission(500, every=1), pruned=np.arange(2500, ROWS))
    for _ in range(4):
        with found(tiers, np.array([2600, 3, 2999])) as places:
            assert places.tolist() == [-1, 3, -1]
    assert (tiers.shared.reads.missed, tiers.shared.reads.rows_read, tiers.shared.reads.admitted) == (0, 0, 0)
    tiers.close()


def test_a_row_that_cannot_be_read_is_named_and_the_rest_goes_on(
    store: SsdStore, table: Bytes, tmp_path: Path
) -> None:
    tiers = tiers_of(store, np.arange(500), BATCH)
    (file,) = (path for path in tmp_path.iterdir() if "users" in path.name)
    with file.open("r+b") as stream:
        stream.seek(-4096, 2)
        stream.write(bytes(4096))
    with pytest.raises(StoreError, match="torn or corrupt: table users row 1999"):
        bytes_of(tiers, np.array([1999]))
    assert np.array_equal(bytes_of(tiers, np.array([700, 3])), table[[700, 3]])
    with file.open("r+b") as stream:
        stream.truncate(4096)
    with pytest.raises(StoreError, match=r"cannot read table users rows 1870 to 1999 in .*too early"):
        bytes_of(tiers, np.array([1999]))
    assert np.array_equal(bytes_of(tiers, np.array([2700, 3])), table[[2700, 3]])
    tiers.close()


def test_a_row_that_was_read_a_moment_ago_is_no_miss(store: SsdStore) -> None:
    tiers = tiers_of(store, np.arange(500), BATCH)
    reads = tiers.shared.reads
    bytes_of(tiers, np.array([3, 700, 700, 900]))
    assert (reads.lookups, reads.missed, reads.rows_read) == (4, 3, 2)
    bytes_of(tiers, np.array([700, 900, 4, 901]))
    assert (reads.lookups, reads.missed, reads.rows_read) == (8, 4, 3)
    look = tiers.look(np.array([950]))
    tiers.ahead(look)
    with tiers.found(look):
        assert (reads.missed, reads.rows_ahead) == (5, 1), "it had to be read, though ahead"
    tiers.close()


def test_memory_counts_slots_index_and_missed_rows(store: SsdStore) -> None:
    tiers = tiers_of(store, np.arange(500), BATCH)
    index = 8 * -(-ROWS // 32) + 4 * 500 + 16 * 12
    assert tiers.dram_bytes == 500 * 4 * WORDS + index + store.overhead_bytes
    bytes_of(tiers, np.arange(490, 600))
    ring, table = 4 * 100 * (4 * WORDS + 8), 12 * (256 - 16)
    assert tiers.dram_bytes == 500 * 4 * WORDS + ring + index + table + store.overhead_bytes
    tiers.close()
