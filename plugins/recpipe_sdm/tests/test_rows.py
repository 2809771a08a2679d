"""Tiered rows: every batch finds the bytes that all rows in DRAM would give it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from recpipe_sdm import rows as rows_module
from recpipe_sdm.admission import Admission
from recpipe_sdm.rows import TieredRows

from recpipe.errors import StoreError
from recpipe.tables.stores.base import StoreLayout
from recpipe.tables.stores.ssd import SsdStore

ROWS, WORDS, BATCH = 3000, 5, 400


@pytest.fixture
def table() -> NDArray[np.uint8]:
    """Random bytes: also such that are no numbers as float32."""
    return np.random.default_rng(1).integers(0, 256, (ROWS, 4 * WORDS), np.uint8)


@pytest.fixture
def store(table: NDArray[np.uint8], tmp_path: Path) -> SsdStore:
    layout = StoreLayout(("users", "items"), (2000, 1000), WORDS)

    def fill(name: str, start: int, stop: int) -> NDArray[np.float32]:
        first = 0 if name == "users" else 2000
        return table[first + start : first + stop].view(np.float32)

    return SsdStore.create(layout, fill, tmp_path, scratch=True)


def batches(count: int, drift: int = 0) -> Iterator[torch.Tensor]:
    """Skewed lookups; the popular rows move on by ``drift`` with every batch."""
    rng = np.random.default_rng(2)
    for number in range(count):
        yield torch.from_numpy((rng.zipf(1.2, BATCH) + drift * number) % ROWS)


def wrong_batches(tier: TieredRows, table: NDArray[np.uint8], count: int = 60, drift: int = 3) -> int:
    """How many batches do not find their rows' bytes while the next one is being read, and once it is."""
    found = 0
    read = tier.announce(torch.zeros(1, dtype=torch.int64))
    wanted = np.zeros(1, np.int64)
    for ids in batches(count, drift):
        places = read.result()
        read = tier.announce(ids)
        read.result()
        found += not np.array_equal(tier.buffer[places].numpy(), table[wanted])
        wanted = ids.numpy()
    tier.close()
    return found


@pytest.mark.parametrize("slots", [0, 1, 500, ROWS])
@pytest.mark.parametrize("adapts", [False, True])
def test_a_batch_finds_its_rows(slots: int, adapts: bool, store: SsdStore, table: NDArray[np.uint8]) -> None:
    tier = TieredRows(store, np.arange(slots), BATCH, Admission(ROWS, every=4) if adapts else None)
    assert wrong_batches(tier, table) == 0
    assert (tier.reads.missed == 0) == (slots == ROWS)
    assert tier.reads.lookups == 60 * BATCH + 1 - BATCH + BATCH
    assert (tier.reads.admitted > 0) == (adapts and 1 <= slots < ROWS)


def test_one_room_for_missed_rows_would_be_overwritten(
    store: SsdStore, table: NDArray[np.uint8], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "ROOMS", 1)
    assert wrong_batches(TieredRows(store, np.arange(500), BATCH), table)


def test_slots_that_were_freed_just_now_are_still_looked_up(
    store: SsdStore, table: NDArray[np.uint8], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: a row that gets the slot of one that leaves in the same change overwrites what
    the batch before looks up."""

    def hasty(self: TieredRows, admission: Admission, rows: torch.Tensor) -> None:
        admission.count(rows)
        self.place[admission.leaving(self.place)] = -1
        self._admit(*admission.chosen())

    monkeypatch.setattr(TieredRows, "_adapt", hasty)
    assert wrong_batches(TieredRows(store, np.arange(500), BATCH, Admission(ROWS, every=4)), table)


def test_popular_rows_get_slots(store: SsdStore) -> None:
    """The rows that are in DRAM at first are looked up by nobody."""
    tier = TieredRows(store, np.arange(ROWS - 500, ROWS), BATCH, Admission(ROWS, every=4))
    shares = []
    for number, ids in enumerate(batches(80)):
        before = tier.reads.missed
        tier.announce(ids).result()
        shares.append((tier.reads.missed - before) / BATCH)
        assert int((tier.place >= 0).sum()) <= 500, number
    assert np.mean(shares[:4]) > 0.8
    assert np.mean(shares[-20:]) < 0.35
    tier.close()


def test_a_row_is_replaced_as_a_whole(store: SsdStore, table: NDArray[np.uint8]) -> None:
    """Half of the replaced rows are in DRAM, half on the SSD."""
    tier = TieredRows(store, np.arange(500), BATCH)
    rows = np.arange(300, 700)
    new = 255 - table[rows]
    first = tier.announce(torch.from_numpy(rows)).result()
    assert np.array_equal(tier.buffer[first].numpy(), table[rows])
    tier.replace(rows, new)
    assert np.array_equal(tier.buffer[tier.announce(torch.from_numpy(rows)).result()].numpy(), new)
    tier.close()


def test_a_row_that_cannot_be_read_is_named_and_the_rest_goes_on(
    store: SsdStore, table: NDArray[np.uint8], tmp_path: Path
) -> None:
    tier = TieredRows(store, np.arange(500), BATCH)
    (file,) = (path for path in tmp_path.iterdir() if "users" in path.name)
    with file.open("r+b") as stream:
        stream.seek(-4096, 2)
        stream.write(bytes(4096))
    with pytest.raises(StoreError, match="torn or corrupt: table users row 1999"):
        tier.announce(torch.tensor([1999])).result()
    places = tier.announce(torch.tensor([700, 3])).result()
    assert np.array_equal(tier.buffer[places].numpy(), table[[700, 3]])
    tier.close()


def test_memory_counts_slots_index_and_missed_rows(store: SsdStore) -> None:
    tier = TieredRows(store, np.arange(500), BATCH)
    assert tier.dram_bytes == 500 * 4 * WORDS + 4 * ROWS + store.overhead_bytes
    tier.announce(torch.arange(490, 600)).result()
    assert tier.dram_bytes == (500 + 2 * 100) * 4 * WORDS + 4 * ROWS + store.overhead_bytes
    tier.close()
