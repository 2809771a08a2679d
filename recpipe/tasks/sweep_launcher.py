"""``hydra/launcher=torchrun``: sweeps whose jobs are runs of several processes, started by torchrun one after
the other.

Hydra composes the sweep in one process, which trains nothing. Each job is a run as a user would start it. Its
ranks get plain overrides and a folder, so that none of them starts the sweep again.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobRuntime, JobStatus, configure_log, filter_overrides, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from recpipe.common.files import JOB_FILE
from recpipe.common.words import quoted
from recpipe.config.launcher import NAME
from recpipe.errors import UserError, shown
from recpipe.tasks.compare_rows import chosen_config
from recpipe.tasks.process import TORCHRUN, end, interrupt_on_sigterm, interrupts_deferred, started
from recpipe.tasks.sweeps import metrics_of, optimized, places_apart

_OF_A_RANK = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*"
)
_OF_THE_SWEEP = re.compile(r"[+~]*hydra([./](launcher|sweeper)|\.(sweep|mode|run\.dir))\b")

log = logging.getLogger(__name__)


class TorchrunLauncher(Launcher):
    """Starts the jobs of a sweep, one torchrun each, never two at once."""

    __module__ = "hydra_plugins.recpipe"  # see register

    environment: ClassVar[Mapping[str, str]] = os.environ
    """The user's own environment; the command line changes this process's for Hydra."""

    def __init__(self, nproc_per_node: int, max_restarts: int, stop_on_failure: bool) -> None:
        self.ranks, self.restarts, self.stop_on_failure = nproc_per_node, max_restarts, stop_on_failure

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Called by Hydra before the sweep; raises UserError for invalid settings."""
        for name, value, least in (("nproc_per_node", self.ranks, 1), ("max_restarts", self.restarts, 0)):
            if value < least:
                raise UserError(f"hydra.launcher.{name}={value}: must be at least {least}")
        self.hydra_context, self.config = hydra_context, config
        self.sweep_dir = Path(str(config.hydra.sweep.dir))

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs, which are numbered from ``initial_job_idx``; a failed job does not stop the others.

        Ctrl-C and SIGTERM end the sweep and the running job, which saves a checkpoint.
        """
        setup_globals()
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        environment = {key: text for key, text in self.environment.items() if not _OF_A_RANK.fullmatch(key)}
        if self.ranks > 1:
            # torchrun would set it itself, with a warning in every job.
            environment.setdefault("OMP_NUM_THREADS", "1")
        jobs: list[_Job] = []
        total = initial_job_idx + len(job_overrides)
        with interrupt_on_sigterm():
            for number, overrides in enumerate(job_overrides, initial_job_idx):
                log.info("job %d/%d: %s", number + 1, total, " ".join(filter_overrides(overrides)))
                jobs.append(self._job(number, list(overrides)))
                jobs[-1].run(environment)
                if jobs[-1].status and self.stop_on_failure:
                    break
        # All failed jobs have the same error, which names them all.
        asked = len(job_overrides)
        lines = []
        for job in jobs:
            if job.status:
                how = f"killed by signal {-job.status}" if job.status < 0 else f"exit status {job.status}"
                lines.append(f"  {job.folder}: {' '.join(filter_overrides(job.overrides))} ({how})")
        left = f"; {asked - len(jobs)} not started (stop_on_failure)" if len(jobs) < asked else ""
        error = UserError(f"{len(lines)} of {asked} jobs failed{left}:", *lines)
        return [job.result(error) for job in jobs]

    def _job(self, number: int, overrides: list[str]) -> _Job:
        config = self.hydra_context.config_loader.load_sweep_config(self.config, overrides)
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = number
        metrics = metrics_of(config, config.hydra)
        folder = self.sweep_dir / str(config.hydra.sweep.subdir)
        carried = [word for word in self.config.hydra.overrides.hydra if not _OF_THE_SWEEP.match(word)]
        words = [*chosen_config(self.config.hydra), *overrides, *carried]
        command = [sys.executable, *TORCHRUN.format(self.ranks).split(), f"--max-restarts={self.restarts}"]
        shared = places_apart(config, self.config.hydra.overrides.task, str(config.hydra.sweep.subdir))
        own = [quoted(key, Path(place)) for key, place in shared if "[" not in key]
        command += ["-m", "recpipe", *words, *own, quoted("hydra.run.dir", folder.absolute())]
        return _Job(number, overrides, config, folder, command, metrics)


@dataclass
class _Job:
    """One job; ``status`` is torchrun's exit status, or None before it ends."""

    number: int
    overrides: list[str]
    config: DictConfig
    folder: Path
    command: list[str]
    metrics: list[str]
    """The figures of its report that the sweeper asks for."""
    status: int | None = None
    stopped: bool = False

    def run(self, environment: Mapping[str, str]) -> None:
        """Run the job to its end and show its output."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write(None)
        began = time.monotonic()
        sys.stdout.flush()
        process = None
        try:
            with interrupts_deferred():  # one that comes meanwhile would leave it running
                process = started(self.command, environment=environment)
            process.wait()
        except BaseException:
            if process is not None:
                self.stopped = True
                log.info("stopping job %d; Ctrl-C again kills it", self.number + 1)
                end(process)
            raise
        finally:
            self.status = None if process is None else process.returncode
            self._write(time.monotonic() - began)

    def _write(self, seconds: float | None) -> None:
        content = {
            "job": self.number,
            "overrides": self.overrides,
            "command": self.command,
            "exit_status": self.status,
            "stopped": self.stopped,
            "seconds": seconds,
        }
        (self.folder / JOB_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def result(self, error: UserError) -> JobReturn:
        """What Hydra's sweeper gets: the figures that it asks for, of the job's report.json, or ``error`` if
        the job failed."""
        value: Any = error
        if not self.status:
            try:
                value = None
                if self.metrics:
                    report = json.loads((self.folder / "report.json").read_text(encoding="utf-8"))
                    value = optimized(self.metrics, report)
            except UserError as fault:
                value = UserError(f"{self.folder}: {fault}")
            except (OSError, ValueError) as fault:
                value = UserError(f"{self.folder}: report.json cannot be read: {shown(fault, 200)}")
        return JobReturn(
            overrides=self.overrides,
            cfg=OmegaConf.masked_copy(self.config, [str(key) for key in self.config if key != "hydra"]),
            hydra_cfg=OmegaConf.masked_copy(self.config, "hydra"),
            working_dir=str(Path.cwd()),
            task_name=JobRuntime.instance().get("name"),
            status=JobStatus.FAILED if isinstance(value, UserError) else JobStatus.COMPLETED,
            _return_value=value,
        )


def refuse_without_sweep() -> None:
    """Raise UserError in a run that names this launcher without being a sweep: it would have one process."""
    choices: Mapping[str, Any] = HydraConfig.get().runtime.choices
    if choices.get("hydra/launcher") == NAME:
        raise UserError(
            f"hydra/launcher={NAME} starts the jobs of a sweep: add -m, or start one run with "
            "torchrun --standalone --nproc-per-node=N -m recpipe ..."
        )


def register() -> None:
    """Make the launcher known to Hydra; calling it again changes nothing."""
    Plugins.instance().register(TorchrunLauncher)
    # Hydra imports launchers only from the package hydra_plugins, which is usually not installed.
    try:
        package = importlib.import_module("hydra_plugins")
    except ImportError:
        package = sys.modules["hydra_plugins"] = ModuleType("hydra_plugins")
        package.__path__ = []
    package.recpipe = sys.modules[__name__]  # type: ignore[attr-defined]
