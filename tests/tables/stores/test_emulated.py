"""A store made slower holds the same rows; what it adds is counted as its time."""

from __future__ import annotations

import time

import numpy as np
import pytest

from recpipe.distributed.ranks import Emulation
from recpipe.plugin.store import StoreLayout
from recpipe.tables.stores.local import EmulatedStore, HostStore

LAYOUT = StoreLayout(("a", "b"), (30, 12), 5)


def test_the_same_rows_later(fill_for, start_of, monkeypatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    store = EmulatedStore(HostStore(LAYOUT, fill_for(LAYOUT)), Emulation(latency_us=50, gbit_per_s=1e-3))
    rows = np.array([41, 3, 7])
    out = np.empty((3, 5), np.float32)
    store.gather(rows, out)
    assert np.array_equal(out, start_of(LAYOUT)[rows])
    store.scatter(rows, -out)
    again = np.empty_like(out)
    store.gather(rows, again)
    assert np.array_equal(again, -out)
    of_request = 50e-6 + 3 * 5 * 4 * 8 / 1e6
    assert slept == pytest.approx([of_request] * 3)
    assert store.io.rows_read == 6
    assert store.io.read_seconds > 2 * of_request
    assert store.io.write_seconds > of_request
    store.close()


def test_no_rows_cost_no_message(fill_for, monkeypatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    store = EmulatedStore(HostStore(LAYOUT, fill_for(LAYOUT)), Emulation(latency_us=50))
    store.gather(np.empty(0, np.int64), np.empty((0, 5), np.float32))
    assert sum(slept) == 0
    store.close()
