"""The directory of an ssd store: which process uses it, what is in it, and how its last user left it."""

from __future__ import annotations

import errno
import json
import logging
import mmap
import os
import re
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from recpipe.common.files import LockFile, Taken, this_process
from recpipe.common.owned import make_directory, remove_made
from recpipe.common.saved import parse_json, typed_as
from recpipe.errors import StoreError
from recpipe.plugin.store import StoreLayout
from recpipe.tables.stores.blocks import BLOCK_BYTES

log = logging.getLogger(__name__)
STATE, LOCK = "store.json", "store.lock"
ROW_FILE = re.compile(r"\d+-[\w.-]*\.rows")
IN_MEMORY = {"tmpfs", "ramfs"}


@dataclass
class StoreState:
    """The content of ``store.json``. ``state`` is "open" while a run writes; ``salt`` seeds the checksums."""

    layout: StoreLayout
    files: list[str]
    """``<index>-<table>.rows`` for each table; characters unfit for a file name are ``_``."""
    salt: int
    generation: int = 1
    state: Literal["open", "closed"] = "open"
    user: str = ""
    """The process that opened the store last, for messages."""


class StoreHome:
    """A directory held under an exclusive lock from construction to ``close``.

    Everything in it is reached relative to the directory's descriptor and without following
    symbolic links. StoreError if it cannot be created or used, or if a live run holds it.
    """

    def __init__(self, directory: str | os.PathLike[str], *, make: bool) -> None:
        self.path = Path(directory)
        self.state: StoreState | None = None
        """The store that ``remove`` removes, once ``begin`` has made it or its user has read it."""
        self._removed = False
        try:
            if make:
                make_directory(self.path)
            self.fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            code = errno.ENOTDIR if error.errno == errno.EEXIST else error.errno
            raise store_error("use the directory", self.path, code or errno.EIO) from error
        try:
            self._lock = LockFile(LOCK, self.fd)
        except Taken as taken:
            os.close(self.fd)
            raise StoreError(
                f"ssd store: {self.path} is in use by another run ({taken}): "
                "wait for it, or set tiers.dir= to another directory"
            ) from taken
        except OSError as error:
            os.close(self.fd)
            raise store_error("lock", self.path / LOCK, error.errno or errno.EIO) from error

    def open_file(self, name: str, flags: int) -> int:
        """Open a file of this directory; StoreError with the remedy if that fails."""
        try:
            return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644, dir_fd=self.fd)
        except OSError as error:
            raise store_error("open", self.path / name, error.errno or errno.EIO) from error

    def begin(self, layout: StoreLayout) -> StoreState:
        """Discard an earlier run's store, with a message if that run crashed, and make the state of a new
        one, before its files, so that those left by a crash are known to be a store's. StoreError if there is
        a file of such a name that no store has made, so that it is not overwritten."""
        old = read_state(self.path, self.fd)
        if old is not None:
            if old.state == "open":
                log.warning(
                    "%s holds the leftovers of a run that crashed (%s): discarded, and filled anew",
                    self.path,
                    old.user,
                )
            self._unlink(old)
        names = [
            f"{i}-{re.sub(r'[^A-Za-z0-9_.-]', '_', table)}.rows" for i, table in enumerate(layout.tables)
        ]
        for name in names:
            with suppress(FileNotFoundError):
                os.stat(name, dir_fd=self.fd, follow_symlinks=False)
                raise store_error("make", self.path / name, errno.EEXIST)
        salt = int.from_bytes(os.urandom(8), "little")
        self.state = StoreState(layout, names, salt, generation=old.generation + 1 if old else 1)
        self.write_state(self.state)
        return self.state

    def write_state(self, state: StoreState) -> None:
        """Replace ``store.json`` atomically; an open state names this process."""
        if state.state == "open":
            state.user = this_process()
        text = json.dumps(
            {"layout": asdict(state.layout)} | {k: v for k, v in vars(state).items() if k != "layout"}
        )
        new = STATE + ".new"
        with suppress(FileNotFoundError):
            os.unlink(new, dir_fd=self.fd)
        made = self.open_file(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            with os.fdopen(made, "w", encoding="utf-8") as file:  # closing it may fail too
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.rename(new, STATE, src_dir_fd=self.fd, dst_dir_fd=self.fd)
            os.fsync(self.fd)
        except OSError as error:
            raise store_error("write", self.path / STATE, error.errno or errno.EIO) from error

    def make_files(self, names: list[str], sizes: list[int]) -> None:
        """Create row files with all their blocks allocated; StoreError if the disk cannot hold them."""
        space = os.fstatvfs(self.fd)
        free = space.f_bavail * space.f_frsize
        try:
            if sum(sizes) > free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            for name, size in zip(names, sizes, strict=True):
                fd = self.open_file(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
                try:
                    if size:
                        os.posix_fallocate(fd, 0, size)
                finally:
                    os.close(fd)
        except OSError as error:
            doing = f"allocate {sum(sizes)} bytes ({free} are free) in"
            raise store_error(doing, self.path, error.errno or errno.EIO) from error

    def open_files(self, names: list[str], sizes: list[int]) -> tuple[list[int], bool]:
        """Descriptors of row files, and whether they bypass the page cache (O_DIRECT).

        If the file system refuses O_DIRECT or is itself in memory, the files are opened buffered, with a
        warning. StoreError if a file is missing or has the wrong size.
        """
        first = next((name for name, size in zip(names, sizes, strict=True) if size), None)
        why = self._why_not_direct(first)
        if why:
            log.warning(
                "%s: %s, so the ssd tier is not read past the page cache (io.direct=false)", self.path, why
            )
        fds: list[int] = []
        try:
            for name, size in zip(names, sizes, strict=True):
                fds.append(self.open_file(name, os.O_RDWR | (0 if why else os.O_DIRECT)))
                if os.fstat(fds[-1]).st_size != size:
                    raise store_error("use", self.path / name, 0)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return fds, not why

    def _why_not_direct(self, name: str | None) -> str:
        """Why O_DIRECT is not available (the beginning of a sentence); empty if it is. It is tried on the
        file ``name``, unless all are empty."""
        if not hasattr(os, "O_DIRECT"):
            return "this system has no O_DIRECT"
        if (kind := _file_system(self.fd)) in IN_MEMORY:
            return f"the file system ({kind}) is in memory"
        if name is None:
            return ""
        try:
            fd = os.open(name, os.O_RDONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.fd)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return "the file system refuses O_DIRECT"
            raise store_error("open", self.path / name, error.errno or errno.EIO) from error
        try:
            os.preadv(fd, [mmap.mmap(-1, BLOCK_BYTES)], 0)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return f"the device refuses O_DIRECT of {BLOCK_BYTES} bytes"
            raise store_error("read", self.path / name, error.errno or errno.EIO) from error
        finally:
            os.close(fd)
        return ""

    def remove(self) -> None:
        """Remove the store, and also the directory if a store made it and it is empty now.

        Other files stay. Calling it again does nothing. The lock is held until ``close``.
        """
        if self._removed:
            return
        self._removed = True
        try:
            if self.state is not None:
                self._unlink(self.state)
            self._lock.remove()
        except OSError as error:
            log.warning("cannot remove the ssd store in %s: %s", self.path, error.strerror)
        remove_made(self.path)

    def _unlink(self, state: StoreState) -> None:
        for name in [*state.files, STATE]:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self.fd)

    def close(self) -> None:
        """Release the directory."""
        self._lock.release()
        os.close(self.fd)


def remove_crashed(top: Path) -> None:
    """Remove the stores that killed runs left in ``top`` and its folders ``rank-N`` and ``group-N``, and log
    it.

    Stores that a live run uses or that were closed properly stay, and so do files that no store made.
    """
    found = []
    ranks = sorted(top.glob("rank-*"))
    groups = [group for place in (*ranks, top) for group in sorted(place.glob("group-*"))]
    for directory in (*groups, *ranks, top):
        with suppress(StoreError):  # in use, or not a store's
            # Read first, since the lock would make a file: an open store is a live or a killed run's.
            state = read_state(directory)
            if state is None or state.state != "open":
                continue
            with closing(StoreHome(directory, make=False)) as home:
                home.state = read_state(directory, home.fd)
                if home.state is not None and home.state.state == "open":
                    home.remove()
                    found.append(home.state.user)
        remove_made(directory)
    if found:
        log.warning("%s: removed the ssd store that a killed run left (%s)", top, found[-1])


def read_state(path: Path, fd: int | None = None) -> StoreState | None:
    """The content of ``store.json`` in a directory, of which ``fd`` may be a descriptor; None if it does not
    exist; StoreError if it is invalid."""
    try:
        name = path / STATE if fd is None else STATE
        state = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise store_error("open", path / STATE, error.errno or errno.EIO) from error
    with os.fdopen(state, "rb") as file:
        content = file.read()
    try:
        found = typed_as(StoreState, parse_json(content))
        if not all(ROW_FILE.fullmatch(name) for name in found.files):
            raise ValueError("a name in files is not a row file's")
        return found
    except ValueError as error:
        raise StoreError(
            f"ssd store: {path / STATE} is not a store's state ({error}): "
            "remove it or set tiers.dir= to another directory"
        ) from error


def _file_system(fd: int) -> str:
    """Type of the file system that ``fd`` is on, from ``/proc/self/mountinfo``; empty if unknown."""
    device = os.fstat(fd).st_dev
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


ELSEWHERE = "set tiers.dir= to a directory on another disk"


REMEDIES = {
    0: "the file ends too early: it was cut or replaced; start again from a checkpoint (resume=)",
    errno.ENOSPC: f"the disk is full: free space or {ELSEWHERE}",
    errno.EDQUOT: f"the disk quota is used up: free space or {ELSEWHERE}",
    errno.EFBIG: f"files may not be that large here: raise the limit (ulimit -f) or {ELSEWHERE}",
    errno.EROFS: f"the file system is read-only: {ELSEWHERE}",
    errno.EACCES: f"no permission: grant write permission or {ELSEWHERE}",
    errno.EPERM: f"not permitted: grant write permission or {ELSEWHERE}",
    errno.ENOTDIR: "a part of the path is not a directory: set tiers.dir= to a directory",
    errno.EEXIST: "there is a file of that name that no store made: remove it or set tiers.dir= elsewhere",
    errno.ENOENT: "there is no such file: set tiers.dir= to a directory that can be made or exists",
    errno.ELOOP: "a store follows no symbolic link: remove it or set tiers.dir= elsewhere",
    errno.EMFILE: "too many open files, one is needed per table: raise the limit (ulimit -n)",
    errno.EIO: f"the device failed: check it (dmesg), {ELSEWHERE}, start again with resume=",
}


def store_error(doing: str, path: str | os.PathLike[str], code: int, remedy: str | None = None) -> StoreError:
    """``cannot <doing> <path>: <reason and remedy>`` for an errno; 0: the file ended early. ``remedy``:
    another one than training's."""
    if remedy is not None:
        reason = f"{os.strerror(code) if code else 'the file ends too early'}; {remedy}"
    else:
        reason = REMEDIES.get(code) or f"{os.strerror(code)}; {ELSEWHERE}"
    return StoreError(f"ssd store: cannot {doing} {os.fspath(path)}: {reason}")
