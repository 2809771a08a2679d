"""The directory of an SSD store: who uses it, what is in it, how its last user left it."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from recpipe.embedding.stores.base import StoreLayout
from recpipe.embedding.stores.faults import store_error
from recpipe.errors import StoreError
from recpipe.saved import parse_json, typed_as

log = logging.getLogger(__name__)
STATE, LOCK = "store.json", "store.lock"
ROW_FILE = re.compile(r"\d+-[\w.-]*\.rows")


@dataclass
class StoreState:
    """What ``store.json`` says. ``state`` is "open" while a run writes; ``salt`` seeds the checksums."""

    layout: StoreLayout
    files: list[str]
    salt: int
    generation: int = 1
    state: Literal["open", "closed"] = "open"
    user: dict[str, str | int] = field(default_factory=dict)

    @property
    def user_name(self) -> str:
        """The process that opened the store last, for messages."""
        who = self.user
        return f"process {who.get('pid')} on {who.get('host')}, started {who.get('started')}"


def file_names(layout: StoreLayout) -> list[str]:
    """``<index>-<table>.rows`` per table; characters unfit for a file name become ``_``."""
    return [
        f"{index}-{re.sub(r'[^A-Za-z0-9_.-]', '_', table)}.rows" for index, table in enumerate(layout.tables)
    ]


class StoreHome:
    """A directory held under an exclusive lock from construction to ``close``.

    Everything in it is reached relative to the directory's descriptor and without following
    symbolic links. StoreError where it cannot be made or used, or where a live run holds it.
    """

    def __init__(self, directory: str | os.PathLike[str], *, make: bool) -> None:
        self.path = Path(directory)
        try:
            if make:
                self.path.mkdir(parents=True, exist_ok=True)
            self.fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            code = errno.ENOTDIR if error.errno == errno.EEXIST else error.errno
            raise store_error("use the directory", self.path, code or errno.EIO) from error
        try:
            self._lock = self._take_lock()
        except BaseException:
            os.close(self.fd)
            raise

    def _take_lock(self) -> int:
        lock = self.open_file(LOCK, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise store_error("lock", self.path / LOCK, error.errno or errno.EIO) from error
            state = self.read_state()
            holder = f" ({state.user_name})" if state else ""
            raise StoreError(
                f"ssd store: {self.path} is in use by another run{holder}: "
                "wait for it, or set tiers.dir= to another directory"
            ) from error
        return lock

    def open_file(self, name: str, flags: int) -> int:
        """Descriptor of a file of this directory; StoreError with the remedy where it cannot be had."""
        try:
            return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644, dir_fd=self.fd)
        except OSError as error:
            raise store_error("open", self.path / name, error.errno or errno.EIO) from error

    def read_state(self) -> StoreState | None:
        """What ``store.json`` says; None where there is none; StoreError where it makes no sense."""
        try:
            fd = os.open(STATE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.fd)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise store_error("open", self.path / STATE, error.errno or errno.EIO) from error
        try:
            with os.fdopen(fd, "rb") as file:
                state = typed_as(StoreState, parse_json(file.read()))
            if not all(ROW_FILE.fullmatch(name) for name in state.files):
                raise ValueError("a name in files is not a row file's")
            return state
        except (OSError, ValueError) as error:
            raise StoreError(
                f"ssd store: {self.path / STATE} is not a store's state ({error}): "
                "remove it or set tiers.dir= to another directory"
            ) from error

    def write_state(self, state: StoreState) -> None:
        """Replace ``store.json`` in one step; an open state names this process."""
        if state.state == "open":
            state.user = _this_process()
        text = json.dumps(
            {"layout": asdict(state.layout)} | {k: v for k, v in vars(state).items() if k != "layout"}
        )
        new = STATE + ".new"
        with suppress(FileNotFoundError):
            os.unlink(new, dir_fd=self.fd)
        with os.fdopen(
            self.open_file(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w", encoding="utf-8"
        ) as file:
            try:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
                os.rename(new, STATE, src_dir_fd=self.fd, dst_dir_fd=self.fd)
                os.fsync(self.fd)
            except OSError as error:
                raise store_error("write", self.path / STATE, error.errno or errno.EIO) from error

    def refuse_foreign(self, names: list[str]) -> None:
        """StoreError where one of the files exists: no store made it, so none may replace it."""
        for name in names:
            with suppress(FileNotFoundError):
                os.stat(name, dir_fd=self.fd, follow_symlinks=False)
                raise store_error("make", self.path / name, errno.EEXIST)

    def discard(self, state: StoreState) -> None:
        """Remove what an earlier run left; say so where it crashed."""
        if state.state == "open":
            log.warning(
                "%s holds the leftovers of a run that crashed (%s): discarded, and filled anew",
                self.path,
                state.user_name,
            )
        self.remove(state)

    def remove(self, state: StoreState) -> None:
        """Remove the row files that ``state`` lists, and ``store.json``."""
        for name in [*state.files, STATE]:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self.fd)

    def close(self) -> None:
        """Let others use the directory."""
        os.close(self._lock)
        os.close(self.fd)


def _this_process() -> dict[str, str | int]:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    return {"pid": os.getpid(), "host": socket.gethostname(), "boot_id": boot, "started": started}
