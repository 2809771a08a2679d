"""The directory of a run: this run's alone while it lasts.

``run.lock`` in it is held from before the first file is written to the end. The system frees it when the
process ends, however it ends, so that the directory of a killed run can be used again. Of several
processes that torchrun started, rank 0 holds it for all.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from recpipe.common.lock import NO_LOCKS, LockFile, Taken
from recpipe.errors import ThroughHydra, UserError, shown

log = logging.getLogger(__name__)
JOB_FILE = "job.json"
"""What is known of the end of a sweep's job, in its folder; ``exit_status`` null: it has not ended."""
LOCK = "run.lock"
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""What a write fails with where the disk or the quota is full."""
ELSEWHERE = "choose another run directory, hydra.run.dir=DIRECTORY (from Python: output=DIRECTORY)"


class RunDir:
    """The directory ``path``, made where it is missing and held until ``close``.

    UserError where another run holds it, with that one's process id, or where nothing can be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._end = ExitStack()
        self._due = False
        if os.environ.get("RANK", "0") == "0":
            self._hold()

    def _hold(self) -> None:
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
        """Have ``action`` carried out when the run ends, also after an error."""
        self._due = True
        self._end.callback(action)

    def let_go(self) -> None:
        """Let other runs have the directory now, if nothing is left in it that the run's end removes."""
        if not self._due:
            self.close()

    def close(self) -> None:
        """Carry out what is due and let other runs have the directory. Twice is once."""
        self._end.close()


def unwritable(what: str | Path, fault: OSError, remedy: str = ELSEWHERE) -> UserError:
    """That ``what``, files of a run, cannot be written, and why, in one line with the remedy."""
    free = "free space, or " if fault.errno in FULL else ""
    return UserError(f"cannot write {shown(what, 300)}: {fault.strerror}; {free}{remedy}")


_taken_early: dict[Path, RunDir] = {}
"""Directories taken before Hydra wrote there, whose run has not begun."""


@contextmanager
def hold(path: Path) -> Iterator[RunDir]:
    """The run directory ``path``, held within the block."""
    run_dir = _taken_early.pop(path, None) or RunDir(path)
    try:
        yield run_dir
    finally:
        run_dir.close()


class TakeRunDir(Callback):
    """Takes the run directory before Hydra writes its own files there; ``hold`` then gives it."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Called by Hydra for a run that is no job of a sweep."""
        path = Path(os.path.abspath(str(OmegaConf.select(config, "hydra.run.dir"))))  # noqa: PTH100 as Hydra
        try:
            _taken_early[path] = RunDir(path)
        except UserError as error:
            # Hydra turns an Exception of a callback into a warning.
            raise ThroughHydra(error) from error

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Called by Hydra for a sweep, whose jobs each take their own."""
        path = Path(str(OmegaConf.select(config, "hydra.sweep.dir")))
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as fault:
            remedy = "choose another folder for the sweep, hydra.sweep.dir=DIRECTORY"
            raise ThroughHydra(unwritable(path, fault, remedy)) from fault


@contextmanager
def letting_go() -> Iterator[None]:
    """Around Hydra: its files that cannot be written are told in one line; in the end no directory is held.

    The run has other errors of the system for itself, but for a full disk, which is nobody's fault.
    """
    try:
        yield
    except OSError as fault:
        if not _taken_early and fault.errno not in FULL:
            raise
        raise unwritable(fault.filename or next(iter(_taken_early), "a file of the run"), fault) from fault
    finally:
        while _taken_early:
            _taken_early.popitem()[1].close()
