"""The directory of an SSD store: which process uses it, what is in it, and how its last user left it."""

from __future__ import annotations

import errno
import json
import logging
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
from recpipe.tables.stores.faults import store_error

log = logging.getLogger(__name__)
STATE, LOCK = "store.json", "store.lock"
ROW_FILE = re.compile(r"\d+-[\w.-]*\.rows")


@dataclass
class StoreState:
    """The content of ``store.json``. ``state`` is "open" while a run writes; ``salt`` seeds the checksums."""

    layout: StoreLayout
    files: list[str]
    salt: int
    generation: int = 1
    state: Literal["open", "closed"] = "open"
    user: str = ""
    """The process that opened the store last, for messages."""


def file_names(layout: StoreLayout) -> list[str]:
    """``<index>-<table>.rows`` per table; characters unfit for a file name become ``_``."""
    return [
        f"{index}-{re.sub(r'[^A-Za-z0-9_.-]', '_', table)}.rows" for index, table in enumerate(layout.tables)
    ]


class StoreHome:
    """A directory held under an exclusive lock from construction to ``close``.

    Everything in it is reached relative to the directory's descriptor and without following
    symbolic links. StoreError if it cannot be created or used, or if a live run holds it.
    """

    def __init__(self, directory: str | os.PathLike[str], *, make: bool) -> None:
        self.path = Path(directory)
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

    def read_state(self) -> StoreState | None:
        """The content of ``store.json``; None if it does not exist; StoreError if it is invalid."""
        return _read_state(self.path, self.fd)

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

    def refuse_foreign(self, names: list[str]) -> None:
        """StoreError if one of the files exists that no store has made, so that it is not overwritten."""
        for name in names:
            with suppress(FileNotFoundError):
                os.stat(name, dir_fd=self.fd, follow_symlinks=False)
                raise store_error("make", self.path / name, errno.EEXIST)

    def discard(self, state: StoreState) -> None:
        """Remove the files of an earlier run's store, with a message if that run crashed."""
        if state.state == "open":
            log.warning(
                "%s holds the leftovers of a run that crashed (%s): discarded, and filled anew",
                self.path,
                state.user,
            )
        self._unlink(state)

    def remove(self, state: StoreState | None) -> None:
        """Remove the store of ``state``, and also the directory if a store made it and it is empty now.

        Other files stay. Calling it again does nothing. The lock is held until ``close``.
        """
        if self._removed:
            return
        self._removed = True
        try:
            if state is not None:
                self._unlink(state)
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
            if not _crashed(directory):
                continue
            with closing(StoreHome(directory, make=False)) as home:
                state = home.read_state()
                if state is not None and state.state == "open":
                    home.remove(state)
                    found.append(state.user)
        remove_made(directory)
    if found:
        log.warning("%s: removed the ssd store that a killed run left (%s)", top, found[-1])


def _crashed(directory: Path) -> bool:
    """Whether ``directory`` has a store that was not closed, which belongs to a live or to a killed run."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        state = _read_state(directory, fd)
    finally:
        os.close(fd)
    return state is not None and state.state == "open"


def _read_state(path: Path, fd: int) -> StoreState | None:
    try:
        state = os.open(STATE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
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
