"""Times the steps and keeps the learning curve."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import asdict
from time import perf_counter
from typing import Any

import lightning as L

from recpipe.common.console import log
from recpipe.common.machine import Load, used_by_others
from recpipe.common.timing import Mark, Spans, mark, synchronized_time
from recpipe.model.metrics import Quality
from recpipe.pipeline.batch import InFlight
from recpipe.pipeline.loader import TrainLoader
from recpipe.report.figures import labelled
from recpipe.report.record import Point, Throughput, rate
from recpipe.training.intervals import Intervals
from recpipe.training.module import LossTotal, RankingModule


class Recorder(L.Callback):
    """Times the steps, keeps the learning curve, and prints a line for each evaluation."""

    def __init__(self, loader: TrainLoader, started: float, intervals: Intervals) -> None:
        self.loader = loader
        self.intervals = intervals
        self.started = started
        self.first_step_seconds = math.nan
        """Seconds from ``started`` to the end of the first step; NaN before that."""
        self._spans = Spans()
        self.step_samples = array("q")
        self.skipped_samples = 0
        """How many of those samples a skipper has left out."""
        self.history: list[Point] = []
        self.quality = Quality(math.nan, math.nan, math.nan)
        """The quality of the latest evaluation."""
        self.evaluated_at = -1
        self.began = math.nan
        """The time of ``perf_counter`` when the first step began; NaN before that."""
        self._load: Load | None = None
        self.evaluation_seconds = 0.0
        self._evaluating = 0.0
        self._before = 0.0
        """Seconds of the parts before this one."""
        self._trained = 0
        self._last: Mark = 0.0
        self._reported = 0
        self._loss = LossTotal()

    @property
    def steps(self) -> int:
        """Steps trained so far in this process."""
        return len(self.step_samples)

    @property
    def step_seconds(self) -> Sequence[float]:
        """Seconds of each of them. On a GPU they are those between events on the training's stream, and this
        waits for it."""
        return self._spans.each()

    @property
    def samples(self) -> int:
        """Samples trained so far in this process's part of the run, which is all of it unless it was
        resumed."""
        return sum(self.step_samples)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock of the first step; in a run resumed inside an epoch, no epoch starts."""
        assert isinstance(pl_module, RankingModule)
        self._load = Load.now()
        self.began, self._last = perf_counter(), mark(self.loader.device)
        self._before = pl_module.totals.seconds
        samples = pl_module.totals.samples or 0
        self.intervals.begin(trainer.global_step, samples, self._seconds(self.began), pl_module.totals.loss)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock of an epoch's first step."""
        self._last = mark(self.loader.device)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: InFlight,
        batch_idx: int,
    ) -> None:
        """Time the step from the end of the one before, so that waiting for data counts."""
        assert isinstance(pl_module, RankingModule)
        ended = mark(self.loader.device)
        if not self.steps:
            self.first_step_seconds = synchronized_time(self.loader.device) - self.started
        self._spans.add(self._last, ended)
        self.step_samples.append(batch.consumed)
        self.skipped_samples += batch.skipped
        self._trained += batch.consumed
        pl_module.totals.seconds = self._seconds(ended if isinstance(ended, float) else perf_counter())
        self._last = ended
        if self.intervals.due():
            self._note(trainer, pl_module)
            self._last = mark(self.loader.device)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Close the last interval."""
        assert isinstance(pl_module, RankingModule)
        if not self.intervals.complete:
            self._note(trainer, pl_module)

    def _note(self, trainer: L.Trainer, module: RankingModule) -> None:
        samples = self._trained if module.totals.samples is None else module.totals.samples
        step = trainer.global_step
        self.intervals.note(step, samples, module.totals.seconds, self._trained, module.totals.loss)

    def _seconds(self, now: float) -> float:
        """Seconds from the process's start to ``now`` without evaluations, and those of the parts before."""
        return self._before + now - self.started - self.evaluation_seconds

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock of an evaluation."""
        self._evaluating = synchronized_time(self.loader.device)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Add a point to the learning curve and print its line."""
        assert isinstance(pl_module, RankingModule)
        quality, total = pl_module.evaluation.result(), pl_module.totals.loss_so_far()
        loss, self._loss = total.mean_since(self._loss), total
        speed = self.speed_since(self._reported)
        self._reported = self.steps
        step, self.evaluated_at = trainer.global_step, trainer.global_step
        samples = self.samples if pl_module.totals.samples is None else pl_module.totals.samples
        self.quality = quality
        measured = asdict(quality)
        held_out = "  ".join(f"{label} {_known(value, '.4f')}" for label, value in labelled(measured))
        self.history.append(
            Point(
                step,
                samples,
                loss=loss,
                samples_per_second=speed,
                eval_loss=measured.pop("loss"),
                seconds=pl_module.totals.seconds,
                **measured,
            )
        )
        log.info(
            f"step {step:>6,}  {samples:>11,} samples  train loss {_known(loss, '.4f')}  {held_out}  "
            f"{_known(speed, ',.0f')} samples/s"
        )
        self._last = mark(self.loader.device)
        self.evaluation_seconds += synchronized_time(self.loader.device) - self._evaluating

    def throughput(self, written_back: float) -> Throughput:
        """Speeds and times of the steps; ``written_back``: the time of ``perf_counter`` when all rows were in
        their tiers again."""
        return Throughput.of_steps(
            self.step_samples,
            self.step_seconds,
            first_step=self.first_step_seconds,
            set_up=self.began - self.started,
            evaluation=self.evaluation_seconds,
            start_to_end=written_back - self.started,
            others=self._others(),
        )

    def _others(self) -> float | None:
        """The share of the processors that other programs used since the first step began. Not with several
        ranks, each of which counts as another program to the others."""
        return used_by_others(self._load) if self.loader.ranks.world == 1 else None

    def speed_since(self, step: int) -> float:
        """Samples per second of this run's steps from number ``step`` on; NaN if there are none."""
        return rate(sum(self.step_samples[step:]), sum(self.step_seconds[step:]))


def _known(value: float | None, form: str) -> str:
    """``value`` in the format ``form``; ``-`` where there is none: a resumed run that evaluates its
    checkpoint first has trained no step, and a held-out part of one class has no AUC."""
    return "-" if value is None or math.isnan(value) else format(value, form)
