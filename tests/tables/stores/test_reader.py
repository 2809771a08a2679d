"""Rows that are read while their caller does something else: the same records and errors as ``gather``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from recpipe.errors import StoreError
from recpipe.plugin.store import StoreLayout
from recpipe.tables.stores.ssd import SsdStore

ROWS, WIDTH = (3000, 500), 5
LAYOUT = StoreLayout(("users", "items"), ROWS, WIDTH)


@pytest.fixture
def records() -> NDArray[np.float32]:
    return np.random.default_rng(1).random((sum(ROWS), WIDTH), np.float32)


@pytest.fixture
def store(records: NDArray[np.float32], tmp_path: Path) -> Iterator[SsdStore]:
    def fill(name: str, start: int, stop: int) -> NDArray[np.float32]:
        first = LAYOUT.bases[LAYOUT.tables.index(name)]
        return records[first + start : first + stop]

    store = SsdStore.create(LAYOUT, fill, tmp_path)
    yield store
    store.close()


def rows_of(count: int) -> NDArray[np.int64]:
    return np.sort(np.random.default_rng(count).choice(sum(ROWS), count, replace=False))


def read(store: SsdStore, rows: NDArray[np.int64], blocks: int) -> NDArray[np.float32]:
    reader, found = store.reader(blocks), np.empty((len(rows), WIDTH), np.float32)
    reader.start(rows)
    store.gather(rows[::-1], np.empty_like(found))  # the store is used meanwhile
    reader.finish(found)
    return found


@pytest.mark.parametrize("blocks", [1, 4, 128])
@pytest.mark.parametrize("count", [0, 1, 40, 3500])
def test_rows_are_read(count: int, blocks: int, store: SsdStore, records: NDArray[np.float32]) -> None:
    """Also several of one block, and more than there is room for."""
    rows = rows_of(count)
    assert np.array_equal(read(store, rows, blocks), records[rows])


def test_a_reader_is_used_again_and_its_memory_counts(store: SsdStore, records: NDArray[np.float32]) -> None:
    before = store.overhead_bytes
    reader = store.reader(8)
    assert store.overhead_bytes == before + 8 * 4096
    for count in (3, 300, 20):
        rows, found = rows_of(count), np.empty((count, WIDTH), np.float32)
        reader.start(rows)
        reader.finish(found)
        assert np.array_equal(found, records[rows])


def test_torn_rows_and_a_file_that_ends_early_are_named(
    store: SsdStore, records: NDArray[np.float32], tmp_path: Path
) -> None:
    (file,) = tmp_path.glob("*users*")
    with file.open("r+b") as stream:
        stream.seek(-4096, 2)
        stream.write(bytes(4096))
    last, reader = np.array([2998, 2999, 3100]), store.reader(4)
    reader.start(last)
    with pytest.raises(StoreError, match="torn or corrupt: table users row 2998, table users row 2999"):
        reader.finish(np.empty((3, WIDTH), np.float32))
    assert np.array_equal(read(store, last[2:], 4), records[last[2:]])
    with file.open("r+b") as stream:
        stream.truncate(4096)
    for _ in range(2):
        reader.start(last)
        with pytest.raises(StoreError, match="cannot read table users rows .* to 2999 in .*too early"):
            reader.finish(np.empty((3, WIDTH), np.float32))


def test_rows_outside_are_refused(store: SsdStore) -> None:
    with pytest.raises(IndexError, match=r"row outside 0\.\.3499"):
        store.reader().start(np.array([3500]))
