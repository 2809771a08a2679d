"""The clock of one run: when it began, what each evaluation found and when, and when it was over.

A run writes ``clock.json``, from which tables, reports and MLPerf's logs are made.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter, process_time, time
from typing import Any, Literal

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn

from recpipe.common.files import unwritable
from recpipe.errors import UserError
from recpipe.training.module import RankingModule

FILE = "clock.json"


@dataclass(frozen=True)
class Evaluation:
    """One evaluation after ``step`` steps and ``samples`` samples; ``start`` and ``stop`` in seconds since
    the run began. ``value``: None where the figure is not defined."""

    step: int
    samples: int
    value: float | None
    start: float
    stop: float


@dataclass
class Timed:
    """A run by its clock, which starts when Lightning does, before the first batch is read.

    ``began``: that time in seconds since 1970. ``first_step``, ``stop``: seconds since then, to the first
    step and to the end of the evaluation that reached the target, or of training. ``cpu_seconds``: of all
    threads of this process in that time. ``threads``: of torch.
    """

    began: float
    first_step: float = 0.0
    stop: float = 0.0
    status: Literal["success", "aborted"] = "aborted"
    cpu_seconds: float = 0.0
    evaluations: list[Evaluation] = field(default_factory=list)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Timed:
        """The content of clock.json."""
        evaluations = [Evaluation(**each) for each in values["evaluations"]]
        return cls(**{**values, "evaluations": evaluations})

    @classmethod
    def read(cls, directory: Path) -> Timed:
        """The clock of the run in ``directory``; ``UserError`` if it has left none."""
        try:
            return cls.of(json.loads((directory / FILE).read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as fault:
            raise UserError(f"{directory / FILE}: not what a timed run leaves ({fault})") from fault

    @property
    def samples(self) -> int:
        """Samples until the last evaluation."""
        return self.evaluations[-1].samples if self.evaluations else 0

    @property
    def value(self) -> float | None:
        """What the last evaluation found."""
        return self.evaluations[-1].value if self.evaluations else None


def reaches(value: float, target: float, better: str) -> bool:
    """Whether ``value`` is as good as ``target``; ``better``: which way, higher or lower. NaN is not."""
    return value >= target if better == "higher" else value <= target


class Clock(L.Callback):
    """Times a run, and ends it with the evaluation whose figure ``metric`` (``auc``, ``LABEL/auc``) is as
    good as ``target``.

    The evaluations that count are those at ``trainer.eval_every``; what is evaluated after training is not.
    ``most``: after so many the run is over in any case; None: when it has trained all. The first trainer
    writes ``directory/clock.json``.
    """

    def __init__(
        self, metric: str, target: float, better: str, directory: str, most: int | None = None
    ) -> None:
        self.metric, self.target, self.better = metric, target, better
        self.directory, self.most = Path(directory), most
        self.timed = Timed(0.0)
        self._began = self._cpu = self._evaluating = 0.0

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock: the model is built, and no batch of this fit has been read."""
        self._began, self._cpu = perf_counter(), process_time()
        self.timed = Timed(time())

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note when the first step starts."""
        self.timed.first_step = self.timed.first_step or self._now()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note when an evaluation starts."""
        self._evaluating = self._now()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note what an evaluation has found; ``UserError`` if there is no such figure."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        assert isinstance(pl_module, RankingModule)
        figures = trainer.callback_metrics
        found = figures.get(f"val/{self.metric}")
        if found is None:
            known = sorted(name.removeprefix("val/") for name in figures if name.startswith("val/"))
            raise UserError(
                f"quality.metric={self.metric}: no evaluation has it; there are {', '.join(known)}"
            )
        value, samples = float(found), pl_module.totals.samples
        self.timed.evaluations.append(
            Evaluation(
                trainer.global_step,
                0 if samples is None else samples,
                None if math.isnan(value) else value,
                self._evaluating,
                self._now(),
            )
        )
        if reaches(value, self.target, self.better):
            self.timed.status, trainer.should_stop = "success", True
        elif len(self.timed.evaluations) == self.most:
            trainer.should_stop = True

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the clock, and write it: with the last evaluation if that has ended the run."""
        assert isinstance(pl_module, RankingModule)
        timed = self.timed
        timed.stop = timed.evaluations[-1].stop if trainer.should_stop and timed.evaluations else self._now()
        timed.cpu_seconds = process_time() - self._cpu
        if pl_module.trainers.index == 0:
            file = self.directory / FILE
            try:
                file.write_text(json.dumps(asdict(timed), indent=1) + "\n", encoding="utf-8")
            except OSError as fault:
                raise unwritable(file, fault) from fault

    def _now(self) -> float:
        return perf_counter() - self._began
