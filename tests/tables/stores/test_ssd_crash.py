"""kill -9 in the middle of scatters: a store knows it, and never hands out a torn row."""

import logging
import os
import random
import time

import numpy as np
import pytest

from recpipe.errors import StoreError
from recpipe.tables.stores.ssd import SsdStore
from tests.processes import Child

ROWS, WIDTH = 5000, 40
WRITER = f"""
import sys, numpy as np
from recpipe.plugin.store import StoreLayout
from recpipe.tables.stores.ssd import SsdStore
layout = StoreLayout(("a", "b"), (4000, 1000), {WIDTH})
zeros = lambda table, start, stop: np.zeros((stop - start, {WIDTH}), np.float32)
store = SsdStore.create(layout, zeros, sys.argv[1], staging_bytes=1 << 20)
print("ready", flush=True)
rng, step = np.random.default_rng(0), 0
while True:
    step += 1
    rows = rng.permutation({ROWS})[:2000]
    store.gather(rows, np.empty((2000, {WIDTH}), np.float32))
    store.scatter(rows, np.full((2000, {WIDTH}), step, np.float32))
"""


@pytest.fixture
def writer(tmp_path):
    """A process that scatters without end; every word of a row is the number of the step that wrote it."""
    processes = []

    def start():
        process = Child(tmp_path / "writer", str(tmp_path), script=WRITER)
        processes.append(process)
        process.until("ready\n")
        return process

    yield start
    for process in processes:
        process.kill()


def kill(process, after):
    time.sleep(after)
    process.kill()


def all_rows(store):
    out = np.empty((ROWS, WIDTH), np.float32)
    store.gather(np.arange(ROWS), out)
    return out


def test_killed_at_random_times(tmp_path, writer, caplog):
    chance = random.Random(3)
    for _ in range(5):
        process = writer()
        kill(process, chance.uniform(0.0, 0.3))
        with pytest.raises(StoreError, match=rf"run that crashed \(process {process.pid} .*resume="):
            SsdStore.open(tmp_path)
        store = SsdStore.open(tmp_path, recover=True)
        records = all_rows(store)
        assert (records == records[:, :1]).all()
        store.close()
    assert records.max() >= 1, "the writer never wrote: this test has shown nothing"


def test_half_written_block_is_refused_and_named(tmp_path, writer):
    kill(writer(), 0.05)
    store = SsdStore.open(tmp_path, recover=True)
    store.scatter(np.arange(24), np.full((24, WIDTH), 1.0, np.float32))
    old = (tmp_path / "0-a.rows").read_bytes()
    store.scatter(np.arange(24), np.full((24, WIDTH), 2.0, np.float32))
    store.flush()
    store._release()  # as a crash does: files let go, store.json still "open"
    new = (tmp_path / "0-a.rows").read_bytes()
    (tmp_path / "0-a.rows").write_bytes(new[:2048] + old[2048:])
    torn = 2048 // 164
    with pytest.raises(StoreError, match=rf"0-a\.rows: torn or corrupt: table a row {torn}: start"):
        SsdStore.open(tmp_path, recover=True)


def test_create_discards_a_crashed_store_and_says_so(tmp_path, writer, caplog, fill_for, start_of):
    process = writer()
    kill(process, 0.05)
    store = SsdStore.open(tmp_path, recover=True)
    store._release()  # files let go without close: crashed once more
    layout = store.layout
    with caplog.at_level(logging.WARNING):
        store = SsdStore.create(layout, fill_for(layout), tmp_path)
    said = [record.getMessage() for record in caplog.records if "crashed" in record.getMessage()]
    assert len(said) == 1
    assert f"process {os.getpid()}" in said[0]
    assert (all_rows(store) == start_of(layout)).all()
    store.close()
    caplog.clear()
    SsdStore.create(layout, fill_for(layout), tmp_path).close()
    assert not [record for record in caplog.records if "crashed" in record.getMessage()]


def test_directory_of_a_live_run_is_refused(tmp_path, writer, fill_for):
    process = writer()
    for use in (lambda: SsdStore.create(None, None, tmp_path), lambda: SsdStore.open(tmp_path, recover=True)):
        with pytest.raises(StoreError, match=rf"in use by another run \(process {process.pid} .*tiers\.dir="):
            use()
    assert process.process.is_alive()
