"""Times the steps and keeps the learning curve."""

from __future__ import annotations

import math
from dataclasses import asdict
from time import perf_counter
from typing import Any

import lightning as L

from recpipe.common.console import log
from recpipe.model.metrics import Quality
from recpipe.pipeline.loader import TrainLoader
from recpipe.pipeline.step import StagedBatch
from recpipe.report.quality import labelled
from recpipe.report.record import Point
from recpipe.training.module import LossTotal, RankingModule


class Recorder(L.Callback):
    """Times the steps and keeps the learning curve; says a line for each evaluation."""

    def __init__(self, loader: TrainLoader, started: float) -> None:
        self.loader = loader
        self.started = started
        self.first_step_seconds = math.nan
        """From ``started`` to the end of the first step; NaN before it."""
        self.step_seconds: list[float] = []
        self.step_samples: list[int] = []
        self.skipped_samples = 0
        """Of those, how many a skipper has left out."""
        self.history: list[Point] = []
        self.quality = Quality(math.nan, math.nan, math.nan)
        """Of the latest evaluation."""
        self.evaluated_at = -1
        self._last = 0.0
        self._reported = 0
        self._loss = LossTotal()

    @property
    def _skipped(self) -> int:
        """Steps left out of the throughput, which find cold caches: the first tenth, at most 10."""
        return min(10, len(self.step_seconds) // 10)

    @property
    def timed_seconds(self) -> float:
        """Training time behind the throughput: no evaluation, no checkpoints."""
        return sum(self.step_seconds[self._skipped :])

    @property
    def timed_samples(self) -> int:
        """Samples trained in ``timed_seconds``."""
        return sum(self.step_samples[self._skipped :])

    @property
    def samples(self) -> int:
        """Samples trained so far in this part of the run, which is the whole of it unless it was resumed."""
        return sum(self.step_samples)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The clock of the first step; a run resumed inside an epoch starts none."""
        self._last = perf_counter()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The clock of an epoch's first step."""
        self._last = perf_counter()

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: StagedBatch,
        batch_idx: int,
    ) -> None:
        """A step lasts from the end of the one before, so that waiting for data counts."""
        now = perf_counter()
        if not self.step_seconds:
            self.first_step_seconds = now - self.started
        self.step_seconds.append(now - self._last)
        self.step_samples.append(batch.consumed)
        self.skipped_samples += batch.skipped
        self._last = perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """One more point of the learning curve, and its line."""
        assert isinstance(pl_module, RankingModule)
        quality, total = pl_module.figures, pl_module.loss_total()
        assert quality is not None
        loss, self._loss = total.mean_since(self._loss), total
        speed = self.speed_since(self._reported)
        self._reported = len(self.step_seconds)
        step, self.evaluated_at = trainer.global_step, trainer.global_step
        samples = self.samples if pl_module.samples is None else pl_module.samples
        self.quality = quality
        measured = asdict(quality)
        held_out = "  ".join(f"{label} {value:.4f}" for label, value in labelled(measured))
        self.history.append(
            Point(
                step, samples, loss=loss, samples_per_second=speed, eval_loss=measured.pop("loss"), **measured
            )
        )
        log.info(
            f"step {step:>6,}  {samples:>11,} samples  train loss {loss:.4f}  {held_out}  "
            f"{speed:,.0f} samples/s"
        )
        self._last = perf_counter()

    def speed_since(self, step: int) -> float:
        """Samples per second of this run's steps from number ``step`` on; NaN without any."""
        seconds = sum(self.step_seconds[step:])
        return sum(self.step_samples[step:]) / seconds if seconds > 0 else math.nan
