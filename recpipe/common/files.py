"""Files that one process has for itself: lock files, and the directory of a run.

The system frees a lock when its owner ends, even if it is killed; until then the file names the owner.
``run.lock`` in a run's directory is held from before the first file is written until the run ends, so that no
other run can use the directory meanwhile. Of several processes that torchrun started, rank 0 holds it for
all.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from recpipe.errors import ThroughHydra, UserError, shown

NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
"""Error numbers of ``flock`` on a file system without locks."""
log = logging.getLogger(__name__)
JOB_FILE = "job.json"
"""The file in the folder of a sweep's job that tells how it ended; ``exit_status`` null: it has not ended."""
EXPORTS = ("task.export_parameters", "task.export_predictions")
"""Keys of directories for numpy's files."""
LOCK = "run.lock"
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error numbers of a write when the disk or the quota is full."""
ELSEWHERE = "choose another run directory, hydra.run.dir=DIRECTORY (from Python: output=DIRECTORY)"
_taken_early: dict[Path, RunDir] = {}
"""Directories taken before Hydra writes there, whose runs have not begun yet."""


class Taken(Exception):
    """Another process holds the lock. The message names it, if the file does."""


class LockFile:
    """An exclusive lock on the file ``name`` (in the directory ``dir_fd``, if given), until ``release``.

    The file is created if it is missing; symbolic links are not followed. Raises ``Taken``, and OSError if
    the file cannot be created or locked. ``text``: what is written into it, None: ``this_process``, "":
    nothing, so that what an earlier owner has left can be read.
    """

    def __init__(self, name: str | Path, dir_fd: int | None = None, text: str | None = None) -> None:
        self._name, self._dir_fd = name, dir_fd
        while True:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open(name, flags, 0o644, dir_fd=dir_fd)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_current():
                    if text != "":
                        with suppress(OSError):  # the disk is full, but the lock is held
                            self.write(text or f"{this_process()}\n")
                    return
            except OSError as fault:
                taken = fault.errno in (errno.EWOULDBLOCK, errno.EACCES)
                owner = self.content().strip()
                if not taken and text != "":
                    self.remove()  # without locks nobody can hold it
                self.release()
                if taken:
                    raise Taken(owner or "a process that has not said which") from fault
                raise
            self.release()  # its owner has just removed the file

    def content(self) -> str:
        """What is in the file, at most 16 MiB."""
        return os.pread(self._fd, 1 << 24, 0).decode(errors="replace")

    def write(self, text: str) -> None:
        """Replace what is in the file; OSError if the disk is full."""
        os.ftruncate(self._fd, os.pwrite(self._fd, text.encode(), 0))

    def _is_current(self) -> bool:
        try:
            there = os.stat(self._name, dir_fd=self._dir_fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(self._fd))

    def remove(self) -> None:
        """Delete the file; this process keeps the lock."""
        if self._is_current():
            os.unlink(self._name, dir_fd=self._dir_fd)

    def release(self) -> None:
        """Release the lock; the file stays unless ``remove`` was called."""
        os.close(self._fd)


def this_process() -> str:
    """A description of this process: its id, its machine, the time."""
    return f"process {os.getpid()} on {socket.gethostname()}, started {time.strftime('%Y-%m-%dT%H:%M:%S%z')}"


def sync(path: Path) -> None:
    """Flush a file or a directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def exchanged(one: Path, other: Path) -> bool:
    """Let two names change places at once, so that each names one of the two at any moment; False if the
    system cannot, and nothing has changed."""
    exchange = getattr(ctypes.CDLL(None), "renameat2", None)
    if exchange is None:
        return False
    here, at_once = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    failed: int = exchange(here, os.fsencode(one), here, os.fsencode(other), at_once)
    return not failed


class RunDir:
    """The directory ``path``, created if it is missing and held until ``close``.

    UserError if another run holds it (with its process id), or if nothing can be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.replaces: dict[str, Path] = {}
        """Places outside with another run's results, which this run replaces, by their keys."""
        self._end = ExitStack()
        self._due = False
        if os.environ.get("RANK", "0") != "0":
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = LockFile(self.path / LOCK)
        except Taken as taken:
            raise UserError(
                f"the run directory {self.path} is in use by another run ({taken}): "
                f"wait for it, or {ELSEWHERE}"
            ) from taken
        except OSError as fault:
            if fault.errno not in NO_LOCKS:
                raise unwritable(self.path, fault) from fault
            log.warning(
                "%s: the file system has no locks (%s): see to it that no other run uses this directory",
                self.path,
                fault.strerror,
            )
            return
        self._end.callback(lock.release)
        self._end.callback(lock.remove)

    def at_end(self, action: Callable[[], object]) -> None:
        """Call ``action`` when the run ends, also after an error."""
        self._due = True
        self._end.callback(action)

    def let_go(self) -> None:
        """Release the directory now, unless something is left in it to remove when the run ends."""
        if not self._due:
            self.close()

    def close(self) -> None:
        """Carry out the actions of ``at_end`` and release the directory. Calling it again does nothing."""
        self._end.close()


def unwritable(what: str | Path, fault: OSError, remedy: str = ELSEWHERE) -> UserError:
    """A one-line error: ``what``, files of a run, cannot be written, why, and the remedy."""
    free = "free space, or " if fault.errno in FULL else ""
    return UserError(f"cannot write {shown(what, 300)}: {fault.strerror}; {free}{remedy}")


@contextmanager
def lock_run_dir(path: Path) -> Iterator[RunDir]:
    """Hold the run directory ``path`` in the block."""
    run_dir = _taken_early.pop(path, None) or RunDir(path)
    try:
        yield run_dir
    finally:
        run_dir.close()


class TakeRunDir(Callback):
    """Takes the run directory before Hydra writes its own files there; ``lock_run_dir`` returns it later."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Called by Hydra for a run that is not a job of a sweep."""
        path = Path(os.path.abspath(str(OmegaConf.select(config, "hydra.run.dir"))))  # noqa: PTH100 as Hydra
        try:
            _taken_early[path] = RunDir(path)
        except UserError as error:
            # Hydra turns an Exception of a callback into a warning.
            raise ThroughHydra(error) from error

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Called by Hydra for a sweep; its jobs take their own directories."""
        path = Path(str(OmegaConf.select(config, "hydra.sweep.dir")))
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as fault:
            remedy = "choose another folder for the sweep, hydra.sweep.dir=DIRECTORY"
            raise ThroughHydra(unwritable(path, fault, remedy)) from fault


@contextmanager
def letting_go() -> Iterator[None]:
    """Around Hydra: report in one line if it cannot write its files, and release all directories in the end.

    The run handles other errors of the system itself, except for a full disk, which can happen anywhere.
    """
    try:
        yield
    except OSError as fault:
        of_a_file = fault.errno is not None  # FBGEMM's library that does not load has no number
        if not of_a_file or (not _taken_early and fault.errno not in FULL):
            raise
        raise unwritable(fault.filename or next(iter(_taken_early), "a file of the run"), fault) from fault
    finally:
        while _taken_early:
            _taken_early.popitem()[1].close()
