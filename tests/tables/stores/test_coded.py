"""Stores of encoded records: fewer bytes, and every way to a row gives the same rounded one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recpipe_bagpipe.bulk import BulkStore

from recpipe.plugin.calls import Origin, Owned
from recpipe.plugin.quantizer import Coding, RecordLayout
from recpipe.plugin.store import StoreLayout
from recpipe.tables.stores import make_store
from recpipe.tables.stores.codecs import COLD
from recpipe.tables.stores.local import CodedStore, HostStore, local_store

LAYOUT = StoreLayout(("a", "b"), (700, 41), 17)


def coding(name: str = "int8") -> Coding:
    return Coding(Owned.of(Origin("acme"), COLD[name](RecordLayout(16, 17))))


def store_of(kind: str, name: str, folder: Path, fill: Any) -> CodedStore:
    made = local_store(
        LAYOUT, fill, coding(name), lambda layout, fill: make_store(kind, layout, fill, directory=folder)
    )
    assert isinstance(made, CodedStore)
    return made


def gathered(store: Any, rows: np.ndarray) -> np.ndarray:
    out = np.full((len(rows), LAYOUT.width), np.nan, np.float32)
    store.gather(rows, out)
    return out


@pytest.mark.parametrize("name", COLD)
@pytest.mark.parametrize("kind", ["host", "ssd"])
def test_it_gives_back_what_the_codec_keeps(kind: str, name: str, tmp_path: Path, fill_for, start_of) -> None:
    store = store_of(kind, name, tmp_path, fill_for(LAYOUT))
    everything, first = np.arange(741), start_of(LAYOUT)
    rounded = coding(name).rounded(first)
    assert np.array_equal(gathered(store, everything), rounded), "first values"
    assert (rounded[:, :16] != first[:, :16]).any()
    assert np.array_equal(rounded[:, 16:], first[:, 16:])
    rows = np.random.default_rng(0).permutation(741)[:300]
    new = np.random.default_rng(1).standard_normal((300, 17)).astype(np.float32)
    store.scatter(rows, new)
    assert np.array_equal(gathered(store, rows), store.rounded(new))
    store.scatter(rows, gathered(store, rows))
    assert np.array_equal(gathered(store, rows), store.rounded(new)), "written back unchanged, it stays"
    store.flush()
    store.close()


def test_bytes_are_those_of_the_encoded_records(fill_for) -> None:
    store = store_of("host", "int8", Path(), fill_for(LAYOUT))
    assert store.cold_bytes == 741 * 28
    store.scatter(np.arange(10), gathered(store, np.arange(10)))
    assert (store.io.bytes_read, store.io.bytes_written) == (280, 280)
    assert store.io.read_seconds > 0


def test_bulk_reads_do_not_depend_on_when_writes_happen(fill_for) -> None:
    inner = store_of("host", "int8", Path(), fill_for(LAYOUT))
    bulk = BulkStore(inner, write_rows=100)
    rows, new = np.arange(50), np.random.default_rng(1).standard_normal((50, 17)).astype(np.float32)
    bulk.announce(rows[:20])
    bulk.scatter(rows, new)  # which waits in memory
    assert np.array_equal(gathered(bulk, rows), inner.rounded(new))
    bulk.flush()
    assert np.array_equal(gathered(bulk, rows), inner.rounded(new))
    bulk.close()


def test_stores_that_keep_all_bits_say_so(fill_for) -> None:
    exact = HostStore(LAYOUT, fill_for(LAYOUT))
    assert exact.rounded is None
    assert BulkStore(exact, 10).rounded is None
    assert local_store(LAYOUT, fill_for(LAYOUT), None, HostStore).rounded is None
