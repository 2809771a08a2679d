from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from recpipe.plugin.store import StoreLayout
from recpipe.tables.stores.ssd import SsdStore


def first_records(layout: StoreLayout) -> np.ndarray:
    """What the stores of these tests start with: each word tells its row and column."""
    rows = np.arange(layout.total_rows, dtype=np.float32)[:, None]
    return rows * 1000 + np.arange(layout.width, dtype=np.float32)


def fill_of(layout: StoreLayout) -> Callable[[str, int, int], np.ndarray]:
    records, bases = first_records(layout), layout.bases

    def fill(table: str, start: int, stop: int) -> np.ndarray:
        base = bases[layout.tables.index(table)]
        return records[base + start : base + stop]

    return fill


@pytest.fixture
def start_of() -> Callable[[StoreLayout], np.ndarray]:
    return first_records


@pytest.fixture
def fill_for() -> Callable[[StoreLayout], Callable[[str, int, int], np.ndarray]]:
    return fill_of


@pytest.fixture
def small(tmp_path: Path):
    """A store of three tables (70, 1 and 200 rows of width 40: 24 a block), and what it holds."""
    layout = StoreLayout(("user", "one", "item"), (70, 1, 200), 40)
    store = SsdStore.create(layout, fill_of(layout), tmp_path / "store")
    yield store, first_records(layout)
    store.close()
