"""Sweeps (``-m``) of any launcher: records how each job ended, and prints the table after the last one."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from recpipe.common.console import append_to_log
from recpipe.common.run_dir import JOB_FILE
from recpipe.errors import UserError


class SweepFolder(Callback):
    """Notes the directory of the jobs of this process's sweep (``hydra.callbacks``)."""

    path: ClassVar[Path | None] = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Called by Hydra in the process that runs the sweep, before the first job."""
        SweepFolder.path = Path(str(config.hydra.sweep.dir))


class JobFailed(Exception):
    """A user's error in one job. Hydra goes on with the next job and raises the error at the sweep's end."""


_failed: list[str] = []


@contextmanager
def table_at_end() -> Iterator[None]:
    """After the block, print the table of the sweep that ran in it, even after an error; nothing without a
    sweep.

    Raises ``UserError`` with a line for each job that ``noted`` has seen fail.
    """
    SweepFolder.path = None
    _failed.clear()
    try:
        yield
    except BaseException as error:
        with suppress(UserError):  # the first error is reported instead
            _print_table()
        if isinstance(error, JobFailed):
            raise UserError(f"{len(_failed)} of the sweep's jobs failed:", *_failed) from error
        raise
    _print_table()


def _print_table() -> None:
    if SweepFolder.path is not None:
        # Imported here: it imports torch, for which a starting sweep need not wait.
        from recpipe.report.sweep import report

        report(SweepFolder.path)


@contextmanager
def noted() -> Iterator[None]:
    """Around a job of a sweep: prints and records how it failed, and lets the sweep go on.

    Raises ``JobFailed`` instead of a ``UserError``. It does nothing for a run that is not a job of a sweep.
    """
    if HydraConfig.get().mode != RunMode.MULTIRUN:
        yield
        return
    _job_file().unlink(missing_ok=True)  # left by an earlier sweep into the same folder
    try:
        yield
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        append_to_log(f"error: {error}")
        _note(2, str(error))
        raise JobFailed(str(error)) from error
    except KeyboardInterrupt:
        _note(130, "interrupted")
        raise
    except Exception as fault:
        _note(1, f"{type(fault).__name__}: {fault}")
        raise


def _job_file() -> Path:
    return Path(HydraConfig.get().runtime.output_dir) / JOB_FILE


def _note(status: int, fault: str) -> None:
    config, file = HydraConfig.get(), _job_file()
    overrides = [str(word) for word in config.overrides.task]
    _failed.append(f"  {file.parent}: {' '.join(overrides)} ({fault})")
    content = {
        "job": config.job.num,
        "overrides": overrides,
        "exit_status": status,
        "stopped": status == 130,
        "fault": fault,
    }
    with suppress(OSError):  # the job may have failed because of a full disk
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
