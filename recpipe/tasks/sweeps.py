"""Sweeps (``-m``) of any launcher: what became of each job, and the table when the last one has ended."""

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
    """Notes where the sweep that this process has started puts its jobs (``hydra.callbacks``)."""

    path: ClassVar[Path | None] = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Hydra calls it in the process that sweeps, before the first job."""
        SweepFolder.path = Path(str(config.hydra.sweep.dir))


class JobFailed(Exception):
    """A user's error in one job: Hydra goes on with the next one and raises it at the sweep's end."""


_failed: list[str] = []


@contextmanager
def table_at_end() -> Iterator[None]:
    """Print the table of the sweep that ran within, however it ended; nothing where no sweep ran.

    Raises ``UserError`` with a line for each job that ``noted`` has seen fail.
    """
    SweepFolder.path = None
    _failed.clear()
    try:
        yield
    except BaseException as error:
        with suppress(UserError):  # the error that came first is the one to tell
            _print_table()
        if isinstance(error, JobFailed):
            raise UserError(f"{len(_failed)} of the sweep's jobs failed:", *_failed) from error
        raise
    _print_table()


def _print_table() -> None:
    if SweepFolder.path is not None:
        # Imports torch, which a sweep that is about to start need not wait for.
        from recpipe.report.sweep import report

        report(SweepFolder.path)


@contextmanager
def noted() -> Iterator[None]:
    """Around a job of a sweep: says and writes down how it failed, and lets the sweep go on.

    Raises ``JobFailed`` in place of a ``UserError``. Around a run that is no job it does nothing.
    """
    if HydraConfig.get().mode != RunMode.MULTIRUN:
        yield
        return
    _job_file().unlink(missing_ok=True)  # of an earlier sweep into the same folder
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
    with suppress(OSError):  # a full disk may be why it failed
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
