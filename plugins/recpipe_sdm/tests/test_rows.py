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
from recpipe_sdm.looks import Look
from recpipe_sdm.ring import Ring
from recpipe_sdm.rows import TieredRows
from recpipe_sdm.tiers import Tiers

from recpipe.errors import StoreError
from recpipe.plugin import RowIds
from recpipe.tables.stores.base import StoreLayout
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


@contextmanager
def found(tier: TieredRows, rows: RowIds) -> Iterator[torch.Tensor]:
    """Their places."""
    tiers = Tiers([tier], tier.using)
    with tiers.found(tiers.look(rows)) as places:
        yield torch.from_numpy(places)


def bytes_of(tier: TieredRows, rows: RowIds) -> Bytes:
    with found(tier, rows) as places:
        return tier.buffer[places].numpy().copy()


def wrong_batches(tier: TieredRows, table: Bytes, count: int = 60, drift: int = 3) -> int:
    """How many batches do not find their rows' bytes, while another thread reads ahead what some of them and
    others, which never come, look up."""
    wrong, ended = 0, threading.Event()

    def read_ahead() -> None:
        rng = np.random.default_rng(5)
        while not ended.is_set():
            for ids in batches(count, drift):
                tier.ahead(tier.look(ids if rng.random() < 0.7 else rng.integers(0, ROWS, 50)))

    reader = threading.Thread(target=read_ahead)
    reader.start()
    try:
        for ids in batches(count, drift):
            wrong += not np.array_equal(bytes_of(tier, ids), table[ids])
    finally:
        ended.set()
        reader.join()
        tier.close()
    return wrong


@pytest.mark.parametrize("slots", [0, 1, 500, ROWS])
@pytest.mark.parametrize("adapts", [False, True])
def test_a_batch_finds_its_rows(slots: int, adapts: bool, store: SsdStore, table: Bytes) -> None:
    tier = TieredRows(store, np.arange(slots), ROWS - slots, Admission(ROWS, every=4) if adapts else None)
    assert wrong_batches(tier, table) == 0
    assert (tier.reads.missed == 0) == (slots == ROWS)
    assert tier.reads.lookups == 60 * BATCH
    assert (tier.reads.admitted > 0) == (adapts and 1 <= slots < ROWS)
    assert bool(tier.reads.rows_ahead) == (slots < ROWS)


def test_a_place_that_is_given_away_must_be_forgotten(
    store: SsdStore, table: Bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: the index still names the ring's places after others have got them."""
    take = Ring.take
    monkeypatch.setattr(Ring, "take", lambda ring, rows, place: take(ring, rows, place.copy()))
    assert wrong_batches(TieredRows(store, np.arange(500), BATCH), table)


def during_a_lookup(tier: TieredRows, rows: RowIds, change: Callable[[], None]) -> Bytes:
    """What a lookup finds while another thread makes a ``change``."""
    other = threading.Thread(target=change)
    with found(tier, rows) as places:
        other.start()
        other.join(0.3)
        seen = tier.buffer[places].numpy().copy()
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
    tier = TieredRows(store, np.arange(500), BATCH)
    if not locked:
        tier.using = Unlocked()  # type: ignore[assignment]
    rows = np.arange(100)
    changes = {
        "replaced": lambda: tier.replace(rows, 255 - table[rows]),
        "admitted": lambda: tier._admit(rows + 1000, rows, rows),
    }
    seen = during_a_lookup(tier, rows, changes[what])  # type: ignore[arg-type]
    assert np.array_equal(seen, table[rows]) == locked
    after = 255 - table[rows] if what == "replaced" else table[rows]
    assert np.array_equal(bytes_of(tier, rows), after)
    tier.close()


def test_what_was_read_ahead_and_never_scored_takes_no_more_room(store: SsdStore, table: Bytes) -> None:
    tier = TieredRows(store, np.arange(500), ROWS - 500)
    rng = np.random.default_rng(3)
    for _ in range(100):
        tier.ahead(tier.look(rng.integers(500, ROWS, 20)))
    assert tier.ring.size <= 4 * 20
    assert int((tier.index >= 500).sum()) <= tier.ring.size
    at = tier.index[500:]
    assert len(np.unique(at[at >= 0])) == int((at >= 0).sum()), "no two rows have the same place"
    assert np.array_equal(bytes_of(tier, np.arange(500, 900)), table[500:900])
    tier.close()


def test_a_row_that_is_replaced_after_it_was_read_ahead_is_the_new_one(store: SsdStore, table: Bytes) -> None:
    tier = TieredRows(store, np.arange(500), BATCH)
    rows = np.arange(900, 1000)
    tier.ahead(tier.look(rows))
    assert tier.replace(rows, 255 - table[rows]) == 100
    assert np.array_equal(bytes_of(tier, rows), 255 - table[rows])
    tier.close()


@pytest.mark.parametrize("counted", [True, False])
def test_rows_that_get_slots_after_a_look_are_found_there(
    counted: bool, store: SsdStore, table: Bytes
) -> None:
    """And those that lost theirs are read. Not if nobody says that slots have changed."""
    tier = TieredRows(store, np.arange(500), BATCH)
    tiers, rows = Tiers([tier], tier.using), np.array([3, 3, 700, 900, 499])
    looks = tiers.look(rows)
    tiers.ahead(looks)
    tier._admit(np.array([700, 901]), np.array([3, 499]), np.array([3, 499]))
    if not counted:
        tier.admissions -= 1
    with tiers.found(looks) as places:
        seen = tier.buffer[torch.from_numpy(places)].numpy().copy()
    assert np.array_equal(seen, table[rows]) == counted
    tier.close()


def test_rows_that_lose_their_slots_once_others_were_read_are_read_too(
    store: SsdStore, table: Bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, read = TieredRows(store, np.arange(500), BATCH), TieredRows.read
    rows, exchanges = np.array([3, 700, 499]), [(np.array([900]), np.array([3]), np.array([3]))]

    def read_and_exchange(own: TieredRows, look: Look) -> None:
        read(own, look)
        if exchanges:
            own._admit(*exchanges.pop())

    monkeypatch.setattr(TieredRows, "read", read_and_exchange)
    assert np.array_equal(bytes_of(tier, rows), table[rows])
    assert not exchanges
    tier.close()


def test_rows_that_change_while_they_are_read_are_read_again(store: SsdStore, table: Bytes) -> None:
    tier = TieredRows(store, np.arange(500), BATCH)
    rows = np.arange(900, 1000)
    scatter = store.scatter

    def read_meanwhile(own: RowIds, records: NDArray[np.float32]) -> None:
        tier.ahead(tier.look(rows))
        tier.land()
        scatter(own, records)

    store.scatter = read_meanwhile  # type: ignore[method-assign]
    assert tier.replace(rows, 255 - table[rows]) == 100
    assert tier.reads.rows_ahead == 0
    assert np.array_equal(bytes_of(tier, rows), 255 - table[rows])
    tier.close()


def test_popular_rows_get_slots(store: SsdStore) -> None:
    """The rows that are in DRAM at first are looked up by nobody."""
    tier = TieredRows(store, np.arange(ROWS - 500, ROWS), BATCH, Admission(ROWS, every=4))
    shares = []
    for number, ids in enumerate(batches(80)):
        before = tier.reads.missed
        bytes_of(tier, ids)
        shares.append((tier.reads.missed - before) / BATCH)
        assert tier._change is None or tier._change.result(10) is None  # asking for reads may begin one
        assert int(((tier.index >= 0) & (tier.index < 500)).sum()) == 500, number
    assert np.mean(shares[:4]) > 0.8
    assert np.mean(shares[-20:]) < 0.35
    tier.close()


def test_counts_of_before_keep_rows_that_nobody_looks_up_yet(store: SsdStore) -> None:
    """Rows 0 to 499 were looked up a thousand times in training, missed ones a few times in serving."""
    first = np.where(np.arange(ROWS) < 500, 1000, 0).astype(np.int32)
    for counts in (first, None):
        admission = Admission(ROWS, every=4, first=counts)
        place = np.where(np.arange(ROWS) < 500, np.arange(ROWS), -1).astype(np.int32)
        admission.count(torch.full((5,), 700), np.full(5, 700))
        entering, leaving = admission.exchange(place, 500)
        assert len(entering) == len(leaving) == (0 if counts is not None else 1)


def test_only_rows_that_differ_are_written(store: SsdStore, table: Bytes) -> None:
    """Half of the replaced rows are in DRAM, half on the SSD."""
    tier = TieredRows(store, np.arange(500), BATCH)
    rows = np.arange(300, 700)
    assert np.array_equal(bytes_of(tier, rows), table[rows])
    written = tier.bytes_written
    assert tier.replace(rows, table[rows]) == 0
    assert tier.bytes_written == written
    new = table[rows].copy()
    new[::100] = 255 - new[::100]
    assert tier.replace(rows, new) == 4
    assert 0 < tier.bytes_written - written <= 4 * 4096
    assert np.array_equal(bytes_of(tier, rows), new)
    tier.close()


def test_pruned_rows_have_no_place_and_are_never_read(store: SsdStore) -> None:
    tier = TieredRows(store, np.arange(500), BATCH, Admission(ROWS, every=1), pruned=np.arange(2500, ROWS))
    for _ in range(4):
        with found(tier, np.array([2600, 3, 2999])) as places:
            assert places.tolist() == [-1, 3, -1]
    assert (tier.reads.missed, tier.reads.rows_read, tier.reads.admitted) == (0, 0, 0)
    tier.close()


def test_a_row_that_cannot_be_read_is_named_and_the_rest_goes_on(
    store: SsdStore, table: Bytes, tmp_path: Path
) -> None:
    tier = TieredRows(store, np.arange(500), BATCH)
    (file,) = (path for path in tmp_path.iterdir() if "users" in path.name)
    with file.open("r+b") as stream:
        stream.seek(-4096, 2)
        stream.write(bytes(4096))
    with pytest.raises(StoreError, match="torn or corrupt: table users row 1999"):
        bytes_of(tier, np.array([1999]))
    assert np.array_equal(bytes_of(tier, np.array([700, 3])), table[[700, 3]])
    with file.open("r+b") as stream:
        stream.truncate(4096)
    with pytest.raises(StoreError, match=r"cannot read table users rows 1870 to 1999 in .*too early"):
        bytes_of(tier, np.array([1999]))
    assert np.array_equal(bytes_of(tier, np.array([2700, 3])), table[[2700, 3]])
    tier.close()


def test_memory_counts_slots_index_and_missed_rows(store: SsdStore) -> None:
    tier = TieredRows(store, np.arange(500), BATCH)
    assert tier.dram_bytes == 500 * 4 * WORDS + 4 * ROWS + store.overhead_bytes
    bytes_of(tier, np.arange(490, 600))
    ring = 4 * 100 * (4 * WORDS + 8)
    assert tier.dram_bytes == 500 * 4 * WORDS + ring + 4 * ROWS + store.overhead_bytes
    tier.close()
