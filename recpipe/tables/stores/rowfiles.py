"""The row files of an SSD store: creates them at full size and opens them past the page cache."""

from __future__ import annotations

import errno
import logging
import mmap
import os
from pathlib import Path

from recpipe.errors import StoreError
from recpipe.tables.stores.blocks import BLOCK_BYTES
from recpipe.tables.stores.faults import store_error
from recpipe.tables.stores.home import StoreHome

log = logging.getLogger(__name__)
IN_MEMORY = {"tmpfs", "ramfs"}


def make_files(home: StoreHome, names: list[str], sizes: list[int]) -> None:
    """Create the files with all their blocks allocated; StoreError if the disk cannot hold them."""
    if sum(sizes) > _free_bytes(home):
        raise _allocation_error(home, sum(sizes), errno.ENOSPC)
    for name, size in zip(names, sizes, strict=True):
        fd = home.open_file(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            if size:
                os.posix_fallocate(fd, 0, size)
        except OSError as error:
            raise _allocation_error(home, sum(sizes), error.errno or errno.EIO) from error
        finally:
            os.close(fd)


def _free_bytes(home: StoreHome) -> int:
    space = os.fstatvfs(home.fd)
    return space.f_bavail * space.f_frsize


def _allocation_error(home: StoreHome, need: int, code: int) -> StoreError:
    free = _free_bytes(home)
    doing = f"allocate {need} bytes ({free} are free) in"
    return store_error(doing, home.path, code)


def open_files(home: StoreHome, names: list[str], sizes: list[int]) -> tuple[list[int], bool]:
    """Descriptors of the files, and whether they bypass the page cache (O_DIRECT).

    If the file system refuses O_DIRECT or is itself in memory, the files are opened buffered, with a warning.
    StoreError if a file is missing or has the wrong size.
    """
    why = _why_not_direct(home, names, sizes)
    if why:
        log.warning(
            "%s: %s, so the ssd tier is not read past the page cache (io.direct=false)", home.path, why
        )
    fds: list[int] = []
    try:
        for name, size in zip(names, sizes, strict=True):
            fds.append(home.open_file(name, os.O_RDWR | (0 if why else os.O_DIRECT)))
            if os.fstat(fds[-1]).st_size != size:
                raise store_error("use", home.path / name, 0)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return fds, not why


def _why_not_direct(home: StoreHome, names: list[str], sizes: list[int]) -> str:
    """Why O_DIRECT is not available (the beginning of a sentence); empty if it is."""
    if not hasattr(os, "O_DIRECT"):
        return "this system has no O_DIRECT"
    if (kind := _file_system(home)) in IN_MEMORY:
        return f"the file system ({kind}) is in memory"
    for name, size in zip(names, sizes, strict=True):
        if size:
            try:
                fd = os.open(name, os.O_RDONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=home.fd)
            except OSError as error:
                if error.errno == errno.EINVAL:
                    return "the file system refuses O_DIRECT"
                raise store_error("open", home.path / name, error.errno or errno.EIO) from error
            try:
                os.preadv(fd, [mmap.mmap(-1, BLOCK_BYTES)], 0)
            except OSError as error:
                if error.errno == errno.EINVAL:
                    return f"the device refuses O_DIRECT of {BLOCK_BYTES} bytes"
                raise store_error("read", home.path / name, error.errno or errno.EIO) from error
            finally:
                os.close(fd)
            break
    return ""


def _file_system(home: StoreHome) -> str:
    """Type of the file system the directory is on, from ``/proc/self/mountinfo``; empty if unknown."""
    device = os.fstat(home.fd).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    for mount in mounts:
        left, _, right = mount.partition(" - ")
        if left.split()[2] == number:
            return right.split()[0]
    return ""
