"""Disks that do not oblige: full, read-only, in memory, not ours. One clear line each, nothing lost."""

import errno
import logging
import os
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest

from recpipe.errors import StoreError
from recpipe.plugin.store import StoreLayout
from recpipe.tables.stores import home
from recpipe.tables.stores.aio import RequestError
from recpipe.tables.stores.ssd import SsdStore

LAYOUT = StoreLayout(("a", "b"), (9000, 3000), 40)


@pytest.fixture
def create(fill_for):
    return lambda directory: SsdStore.create(LAYOUT, fill_for(LAYOUT), directory)


@pytest.fixture
def mounted(tmp_path):
    """Mounts a small file system in memory with the given options, where this user may."""
    target = tmp_path / "disk"
    target.mkdir()

    def mount(options):
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", target], capture_output=True)
        if done.returncode:
            pytest.skip(f"mounting is not permitted here: {done.stderr.decode().strip()}")
        return target

    yield mount
    subprocess.run(["umount", target], capture_output=True)


def no_rows_in(directory):
    return not list(directory.glob("*.rows")) and not (directory / "store.json").exists()


def test_full_disk(mounted, create):
    disk = mounted("size=1m")
    with pytest.raises(StoreError, match=r"allocate 2048000 bytes \(\d+ are free\) in .*full.*tiers\.dir="):
        create(disk)
    assert no_rows_in(disk)


def test_a_disk_that_is_full_before_the_first_row(mounted, create):
    disk = mounted("size=64k")
    (disk / "other").write_bytes(bytes(60 << 10))
    with pytest.raises(StoreError, match=r"cannot write .*store\.json: the disk is full.*tiers\.dir="):
        create(disk)
    assert no_rows_in(disk)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_allocation_refused(tmp_path, create, monkeypatch, code):
    sizes = []

    def refuse_the_second(fd, offset, size):
        sizes.append(size)
        if len(sizes) == 2:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(home.os, "posix_fallocate", refuse_the_second)
    with pytest.raises(StoreError, match=r"allocate 2048000 bytes \(\d+ are free\) in .*tiers\.dir="):
        create(tmp_path)
    assert no_rows_in(tmp_path)


def test_read_only_disk(mounted, create):
    disk = mounted("ro")
    with pytest.raises(StoreError, match=r"read-only: set tiers\.dir="):
        create(disk)
    with pytest.raises(StoreError, match=r"read-only: set tiers\.dir="):
        create(disk / "below")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_no_permission(tmp_path, create):
    tmp_path.chmod(0o555)
    with pytest.raises(StoreError, match=r"no permission: .*tiers\.dir="):
        create(tmp_path)


def test_not_a_directory(tmp_path, create):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError, match=r"not a directory: set tiers\.dir="):
            create(path)
    assert (tmp_path / "file").read_text() == "mine"


def test_no_store(tmp_path):
    with pytest.raises(StoreError, match="there is no store in"):
        SsdStore.open(tmp_path)
    with pytest.raises(StoreError, match="no such file"):
        SsdStore.open(tmp_path / "nowhere")


def test_foreign_files_are_left_alone(tmp_path, create):
    (tmp_path / "1-b.rows").write_text("mine")
    with pytest.raises(StoreError, match=r"1-b\.rows: there is a file of that name that no store made"):
        create(tmp_path)
    assert (tmp_path / "1-b.rows").read_text() == "mine"


def test_symbolic_links_are_not_followed(tmp_path, create):
    outside = tmp_path / "outside"
    outside.write_text("mine")
    store = create(tmp_path / "store")
    store.close()
    rows = store.directory / "0-a.rows"
    rows.unlink()
    rows.symlink_to(outside)
    with pytest.raises(StoreError, match="follows no symbolic link"):
        SsdStore.open(store.directory)
    create(store.directory).close()  # replaces the link, not what it leads to
    assert outside.read_text() == "mine"
    assert not rows.is_symlink()


MISTYPED = '{"layout": {"tables": ["a"], "rows": ["9"], "width": 1}, "files": ["0-a.rows"], "salt": 1}'


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}", "[]", '{"state": 1', '{"layout": {"tables": [], "rows": [], "width": 1}}'),
        *(MISTYPED, MISTYPED.replace('["0-a.rows"]', "[3]"), "[" * 100_000),
    ],
    ids=range(8),
)
def test_foreign_state_is_refused(tmp_path, create, text):
    (tmp_path / "store.json").write_text(text)
    with pytest.raises(StoreError, match="is not a store's state"):
        create(tmp_path)
    assert (tmp_path / "store.json").read_text() == text


def test_state_cannot_name_files_outside(tmp_path, create):
    store = create(tmp_path / "store")
    store.close()
    (tmp_path / "precious").write_text("mine")
    state = store.directory / "store.json"
    state.write_text(state.read_text().replace("0-a.rows", "../precious"))
    with pytest.raises(StoreError, match="is not a store's state"):
        create(store.directory)
    assert (tmp_path / "precious").exists()


def test_failed_fill_leaves_nothing(tmp_path):
    def fill(table, start, stop):
        if table == "b":
            raise RuntimeError("no more")
        return np.zeros((stop - start, 40), np.float32)

    with pytest.raises(RuntimeError, match="no more"):
        SsdStore.create(LAYOUT, fill, tmp_path)
    assert no_rows_in(tmp_path)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no file system in memory here")
def test_memory_is_not_called_direct(create, caplog):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory, caplog.at_level(logging.WARNING):
        store = create(directory)
        assert store.direct is False
        assert store.engine == "threads"
        assert "tmpfs) is in memory" in caplog.text
        store.close()


def test_direct_io_refused(tmp_path, create, monkeypatch, caplog):
    whole = os.open

    def refuse_direct(path, flags, *rest, **named):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return whole(path, flags, *rest, **named)

    monkeypatch.setattr(home.os, "open", refuse_direct)
    with caplog.at_level(logging.WARNING):
        store = create(tmp_path)
    assert store.direct is False
    assert "refuses O_DIRECT" in caplog.text
    store.close()


def test_failing_device(tmp_path, create, monkeypatch):
    store = create(tmp_path)
    rows, records = np.array([0, 10_000]), np.zeros((2, 40), np.float32)
    store.gather(rows, records)
    before = records.copy()

    def fail(requests, buffer, *, write):
        raise RequestError(1, errno.EIO)

    with monkeypatch.context() as patch:
        patch.setattr(store._transfer, "run", fail)
        with pytest.raises(StoreError, match=r"cannot write .*1-b\.rows: the device failed.*resume="):
            store.scatter(rows, records - 1)
        with pytest.raises(StoreError, match=r"cannot read .*1-b\.rows"):
            store.gather(rows, records)
    store.scatter(np.array([1, 10_001]), records)  # same blocks: must not carry what failed above
    store.gather(rows, records)
    assert (records == before).all()
    store.close()
