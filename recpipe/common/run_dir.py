"""The directory of a run, which no other run can use at the same time.

``run.lock`` in it is held from before the first file is written until the run ends. The system frees it when
the process ends, even if it is killed, so that the directory of a killed run can be used again. Of several
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
"""The file in the folder of a sweep's job that tells how it ended; ``exit_status`` null: it has not ended."""
EXPORTS = ("task.export_parameters", "task.export_predictions")
"""Keys of directories for numpy's files."""
LOCK = "run.lock"
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error numbers of a write when the disk or the quota is full."""
ELSEWHERE = "choose another run directory, hydra.run.dir=DIRECTORY (from Python: output=DIRECTORY)"


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


_taken_early: dict[Path, RunDir] = {}
"""Directories taken before Hydra writes there, whose runs have not begun yet."""


@contextmanager
def hold(path: Path) -> Iterator[RunDir]:
    """Hold the run directory ``path`` in the block."""
    run_dir = _taken_early.pop(path, None) or RunDir(path)
    try:
        yield run_dir
    finally:
        run_dir.close()


class TakeRunDir(Callback):
    """Takes the run directory before Hydra writes its own files there; ``hold`` returns it later."""

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
