"""What an SSD store puts on the disk, what it refuses to read back, and what memory it takes."""

import numpy as np
import pytest

from recpipe.errors import StoreError
from recpipe.plugin.store import StoreLayout
from recpipe.tables.stores.blocks import BlockMap
from recpipe.tables.stores.ssd import SsdStore


def read_all(store):
    out = np.empty((store.layout.total_rows, store.layout.width), np.float32)
    store.gather(np.arange(len(out)), out)
    return out


def row_files(store):
    return sorted(store.directory.glob("*.rows"))


@pytest.mark.parametrize("width", [1, 16, 17, 40, 511, 600, 1023])
def test_no_row_crosses_a_block_border(tmp_path, fill_for, start_of, width):
    layout = StoreLayout(("a", "b/c"), (100, 31), width)
    with_rows, per_block = start_of(layout), 4096 // (4 * width + 4)
    SsdStore.create(layout, fill_for(layout), tmp_path).close()
    assert [path.name for path in sorted(tmp_path.glob("*.rows"))] == ["0-a.rows", "1-b_c.rows"]
    for name, base, rows in (("0-a.rows", 0, 100), ("1-b_c.rows", 100, 31)):
        data = (tmp_path / name).read_bytes()
        assert len(data) == 4096 * -(-rows // per_block)
        for row in range(rows):
            block, lane = divmod(row, per_block)
            inside = data[4096 * block : 4096 * (block + 1)]
            start = lane * (4 * width + 4)
            assert inside[start : start + 4 * width] == with_rows[base + row].tobytes()


def test_every_corrupted_byte_is_found(small):
    store, _ = small
    path, rng = row_files(store)[2], np.random.default_rng(0)
    whole = path.read_bytes()
    for at in rng.integers(0, 24 * 164, 40).tolist():
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        with pytest.raises(StoreError, match=rf"2-item\.rows.*table item row {at // 164}:.*resume="):
            read_all(store)
        assert store.verify().tolist() == [71 + at // 164]
    path.write_bytes(whole)
    read_all(store)


def test_whole_rows_in_wrong_places_are_found(small):
    store, _ = small
    path = row_files(store)[0]
    whole = path.read_bytes()
    path.write_bytes(whole[164:328] + whole[:164] + whole[328:])  # swap rows 0 and 1
    assert store.verify().tolist() == [0, 1]
    path.write_bytes(whole[4096:8192] + whole[4096:])  # block 1 where block 0 should be
    assert store.verify().tolist() == list(range(24))
    path.write_bytes(bytes(4096) + whole[4096:])  # a block that never reached the disk
    assert store.verify().tolist() == list(range(24))


def test_rows_of_another_store_are_found(tmp_path, small, fill_for):
    store, _ = small
    with_same_rows = SsdStore.create(store.layout, fill_for(store.layout), tmp_path / "other")
    row_files(store)[0].write_bytes(row_files(with_same_rows)[0].read_bytes())
    with_same_rows.close()
    assert store.verify().tolist() == list(range(70))


def test_torn_row_is_replaced_by_a_scatter(small):
    store, records = small
    path = row_files(store)[0]
    path.write_bytes(b"\xff" * 164 + path.read_bytes()[164:])
    store.scatter(np.array([0]), records[:1])
    assert (read_all(store) == records).all()


def test_file_cut_short(small):
    store, _ = small
    path = row_files(store)[2]
    path.write_bytes(path.read_bytes()[:4096])
    with pytest.raises(StoreError, match=r"cannot read .*2-item\.rows: the file ends too early"):
        read_all(store)
    store.gather(np.arange(70), np.empty((70, 40), np.float32))  # the other files still serve


def test_reopened_store_holds_what_was_scattered(small):
    store, records = small
    records = records * 2
    store.scatter(np.arange(len(records)), records)
    store.close()
    store.close()
    again = SsdStore.open(store.directory)
    assert again.layout == store.layout
    assert (read_all(again) == records).all()
    again.close()


def test_gather_always_reads_the_disk_and_scatter_need_not(small):
    store, records = small
    rows = np.array([0, 1, 30])
    for times in (1, 2):
        store.gather(rows, records[rows])
        assert store.io.bytes_read == times * 2 * 4096
    store.scatter(rows, records[rows])
    assert (store.io.rows_staged, store.io.bytes_read) == (3, 4 * 4096)
    store.scatter(np.array([200]), records[200:201])
    assert (store.io.rows_staged, store.io.bytes_read) == (3, 5 * 4096)


def test_a_block_alone_between_two_wanted_ones_is_read_with_them() -> None:
    layout = StoreLayout(("a", "b"), (292, 730), 6)  # 146 rows a block: blocks 0 and 1, and 2 to 6
    blocks = BlockMap(layout)
    for wanted, expected in (([0, 2], [0, 2]), ([2, 4, 6], [2, 3, 4, 5, 6]), ([2, 5], [2, 5]), ([], [])):
        assert blocks.bridged(np.array(wanted, np.int64)).tolist() == expected


def test_one_request_reads_a_run_of_blocks_of_which_some_are_staged(
    tmp_path, fill_for, start_of, monkeypatch
):
    layout = StoreLayout(("a", "b", "c"), (30 * 24, 3 * 24, 60 * 24), 40)  # 24 rows a block
    rows = np.arange(33 * 24)
    records = start_of(layout)[rows]
    store = SsdStore.create(layout, fill_for(layout), tmp_path)
    made, run = [], store._transfer.run

    def counted(requests, buffer, *, write):
        made.append((write, len(requests.fds)))
        run(requests, buffer, write=write)

    monkeypatch.setattr(store._transfer, "run", counted)
    some, out = rows[: 30 * 24 : 3 * 24], np.empty_like(records)
    store.gather(some, out[: len(some)])
    store.gather(rows, out)
    assert np.array_equal(out, records)
    store.scatter(rows, -records)
    assert made == [(False, 10), (False, 2), (True, 2)], "a request for each file"
    assert store.io.rows_staged == len(rows)
    assert np.array_equal(read_all(store)[rows], -records)
    store.close()


def test_a_block_written_whole_is_not_read(small):
    store, records = small
    store.scatter(np.arange(24), records[:24])
    store.scatter(np.array([70]), records[70:71])  # the one row of its table
    assert store.io.bytes_read == 0


def test_memory_is_bounded(tmp_path, fill_for):
    layout = StoreLayout(("a",), (20_000,), 127)
    store = SsdStore.create(layout, fill_for(layout), tmp_path, staging_bytes=64 * 4096)
    blocks = store.cold_bytes // 4096
    assert store.overhead_bytes == 64 * 4096 + 64 * 8 + blocks * 4
    read_all(store)
    store.close()
