"""All stores against a plain array: whatever the order of calls, a gather sees every earlier scatter."""

import numpy as np
import pytest

from recpipe.errors import UserError
from recpipe.plugin.calls import Origin, Owned
from recpipe.plugin.quantizer import Coding, RowCodec
from recpipe.plugin.store import StoreLayout
from recpipe.tables.stores import make_store
from recpipe.tables.stores.local import HostStore, local_store
from recpipe.tables.stores.ssd import SsdStore

LAYOUTS = {
    "one row per block": StoreLayout(("a", "b"), (9, 30), 600),
    "does not divide a block": StoreLayout(("a", "one", "none", "b"), (700, 1, 0, 333), 17),
    "whole block": StoreLayout(("a",), (12,), 1023),
    "larger than a block": StoreLayout(("a", "b"), (5, 8), 1500),
    "width one": StoreLayout(("a", "b"), (1, 5000), 1),
}
STAGING = {"ample": 32 << 20, "tiny": 3 * 4096, "one block": 1}


class Marked(RowCodec):
    """All of a record and a mark: one byte more than words."""

    def __init__(self, width):
        self.bytes_per_record = 4 * width + 1

    def encode(self, records):
        mark = np.full((len(records), 1), 0xA5, np.uint8)
        return np.concatenate((records.view(np.uint8), mark), axis=1)

    def decode(self, encoded, out):
        assert (encoded[:, -1] == 0xA5).all()
        out[...] = np.ascontiguousarray(encoded[:, :-1]).view(np.float32)


@pytest.fixture(params=["host", "coded host", "coded ssd", *STAGING])
def kind(request):
    return request.param


@pytest.fixture(params=LAYOUTS)
def layout(request):
    return LAYOUTS[request.param]


@pytest.fixture
def store(kind, layout, tmp_path, fill_for):
    if kind == "host":
        made = HostStore(layout, fill_for(layout))
    elif kind.startswith("coded"):
        coding = Coding(Owned.of(Origin("acme"), Marked(layout.width)))
        made = local_store(
            layout, fill_for(layout), coding, lambda *of: make_store(kind[6:], *of, directory=tmp_path)
        )
    else:
        made = SsdStore.create(layout, fill_for(layout), tmp_path / "s", staging_bytes=STAGING[kind])
    yield made
    made.close()


def gathered(store, rows):
    out = np.full((len(rows), store.layout.width), np.nan, np.float32)
    store.gather(rows, out)
    return out


def test_random_calls_match_an_array(store, layout, start_of):
    model, rng, total = start_of(layout), np.random.default_rng(1), layout.total_rows
    assert (gathered(store, np.arange(total)) == model).all()
    pending = []
    for _ in range(30):
        rows = rng.permutation(total)[: rng.integers(0, min(total, 300) + 1)]
        if rng.random() < 0.5:
            rows.sort()
        assert (gathered(store, rows) == model[rows]).all()
        pending.append(rows)
        if len(pending) > rng.integers(0, 3):  # now and then two gathers before the first one's scatter
            back = pending.pop(0)
            new = rng.standard_normal((len(back), layout.width)).astype(np.float32)
            store.scatter(back, new)
            model[back] = new
    assert (gathered(store, np.arange(total)) == model).all()


def test_next_gather_before_this_scatter_with_shared_blocks(store, layout, start_of):
    model = start_of(layout)
    even, odd = np.arange(0, layout.total_rows, 2), np.arange(1, layout.total_rows, 2)
    gathered(store, even)
    gathered(store, odd)
    for rows, value in ((even, -1.0), (odd, -2.0)):
        model[rows] = value
        store.scatter(rows, np.ascontiguousarray(model[rows]))
    assert (gathered(store, np.arange(layout.total_rows)) == model).all()


def test_bits_are_kept(store, layout):
    words = np.random.default_rng(0).integers(0, 2**32, (1, layout.width), dtype=np.uint32)
    words[0, 0] = 0x7FC12345  # a NaN with a payload
    store.scatter(np.array([3]), words.view(np.float32))
    assert (gathered(store, np.array([3])).view(np.uint32) == words).all()


def test_no_rows(store, layout):
    nothing = np.empty((0, layout.width), np.float32)
    store.gather(np.empty(0, np.int64), nothing)
    store.scatter(np.empty(0, np.int64), nothing)
    assert store.io.rows_read == store.io.rows_written == store.io.bytes_read == 0


@pytest.mark.parametrize("past", [-1, 0])
def test_row_outside_is_refused(store, layout, past):
    row = np.array([past if past < 0 else layout.total_rows])
    record = np.zeros((1, layout.width), np.float32)
    with pytest.raises(IndexError):
        store.gather(row, record)
    with pytest.raises(IndexError):
        store.scatter(row, record)


def test_counters(store, layout):
    rows = np.arange(5)
    store.scatter(rows, gathered(store, rows))
    assert store.io.rows_read == store.io.rows_written == 5
    assert store.io.bytes_read > 0
    assert store.io.bytes_written >= 5 * 4 * layout.width
    assert store.cold_bytes >= 4 * layout.total_rows * layout.width


def test_host_is_not_a_file(fill_for):
    layout = LAYOUTS["width one"]
    store = HostStore(layout, fill_for(layout))
    assert store.direct is None
    assert store.overhead_bytes == 0
    assert store.cold_bytes == 4 * layout.total_rows


def test_fill_of_a_wrong_shape_is_refused():
    with pytest.raises(ValueError, match="gave shape"):
        HostStore(LAYOUTS["whole block"], lambda _, start, stop: np.zeros((stop - start, 3), np.float32))


def test_make_store(tmp_path, fill_for):
    layout = LAYOUTS["whole block"]
    assert isinstance(make_store("host", layout, fill_for(layout)), HostStore)
    store = make_store("ssd", layout, fill_for(layout), directory=tmp_path)
    assert isinstance(store, SsdStore)
    store.close()
    with pytest.raises(UserError, match=r"tiers\.store=hots: no such store \(there are: host, ssd\)"):
        make_store("hots", layout, fill_for(layout))
    with pytest.raises(UserError, match=r"tiers\.dir="):
        make_store("ssd", layout, fill_for(layout))
