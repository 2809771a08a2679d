"""Times the steps and keeps the learning curve."""

from __future__ import annotations

import math
from time import perf_counter
from typing import Any

import lightning as L

from recpipe.console import log
from recpipe.metrics import Quality
from recpipe.model.module import RankingModule
from recpipe.pipeline.loader import TrainLoader
from recpipe.pipeline.step import StagedBatch
from recpipe.report.record import Point


class Recorder(L.Callback):
    """Times the steps and keeps the learning curve; says a line for each evaluation as it is known."""

    def __init__(self, loader: TrainLoader, started: float) -> None:
        self.loader = loader
        self.started = started
        self.first_step_seconds = math.nan
        """From ``started`` to the end of the first step; NaN before it."""
        self.step_seconds: list[float] = []
        self.step_samples: list[int] = []
        self.history: list[Point] = []
        self.evaluated_at = -1
        self._waiting: list[tuple[int, int, float, float, Any]] = []
        self._last = 0.0
        self._reported = 0

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
        self._tell_known()
        self._last = perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hand the predictions to the thread that computes the figures; training goes on."""
        assert isinstance(pl_module, RankingModule)
        seconds = sum(self.step_seconds[self._reported :])
        speed = sum(self.step_samples[self._reported :]) / seconds if seconds > 0 else float("nan")
        self._reported = len(self.step_seconds)
        future = pl_module.quality.submit(trainer.global_step)
        self.evaluated_at = trainer.global_step
        samples = self.samples if pl_module.samples is None else pl_module.samples
        self._waiting.append((trainer.global_step, samples, pl_module.take_mean_loss(), speed, future))
        self._last = perf_counter()

    def finish(self) -> None:
        """Wait for the figures that are still being computed."""
        self._tell_known(wait=True)

    def _tell_known(self, wait: bool = False) -> None:
        while self._waiting and (wait or self._waiting[0][4].done()):
            step, samples, loss, speed, future = self._waiting.pop(0)
            quality: Quality = future.result()
            self.history.append(Point(step, samples, quality.auc, quality.logloss, quality.ne, loss, speed))
            log.info(
                f"step {step:>6,}  {samples:>11,} samples  train loss {loss:.4f}  AUC {quality.auc:.4f}  "
                f"logloss {quality.logloss:.4f}  NE {quality.ne:.4f}  {speed:,.0f} samples/s"
            )
