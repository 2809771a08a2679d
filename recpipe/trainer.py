"""Lightning's Trainer as a recipe asks for it: progress bar, checkpoints, loggers, signals, timing."""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar, RichProgressBar, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.plugins.io import CheckpointIO

from recpipe.checkpoint import SUFFIX
from recpipe.errors import UserError
from recpipe.metrics import Quality
from recpipe.model.module import LOG_EVERY, RankingModule
from recpipe.pipeline.loader import EvalLoader, TrainLoader
from recpipe.pipeline.step import StagedBatch
from recpipe.ranks import Channel
from recpipe.report.record import Point


@dataclass(frozen=True)
class TrainerConfig:
    """``conf/trainer``; ``eval_every`` and ``checkpoint_every`` are whole steps or a share of an epoch."""

    max_epochs: int
    max_steps: int | None
    device: str
    eval_every: int | float
    checkpoint_every: int | float | None
    keep_checkpoints: int
    checkpoint_dir: str | None
    logger: str | None
    progress: bool

    def __post_init__(self) -> None:
        if self.max_epochs < 1 or (self.max_steps is not None and self.max_steps < 1):
            raise UserError(
                f"trainer.max_epochs={self.max_epochs}, max_steps={self.max_steps}: train at least one"
            )
        for name in ("eval_every", "checkpoint_every"):
            every = getattr(self, name)
            if every is not None and (not every > 0 or (isinstance(every, float) and every > 1)):
                raise UserError(
                    f"trainer.{name}={every}: give a whole number of steps, or a share of an epoch (0.25)"
                )
        if self.logger not in (None, "csv", "tensorboard"):
            raise UserError(f"trainer.logger={self.logger} is unknown; choose csv, tensorboard or null")

    def interval(self, every: int | float, steps_per_epoch: int) -> int:
        """``every`` as a number of steps, at most an epoch's; shares are of the run when that is shorter."""
        steps = (
            every
            if isinstance(every, int)
            else every * min(steps_per_epoch, self.max_steps or steps_per_epoch)
        )
        return max(1, min(math.ceil(steps), steps_per_epoch))

    def checkpoints(self, run_dir: Path) -> Path:
        """Where checkpoints go."""
        return Path(self.checkpoint_dir).expanduser() if self.checkpoint_dir else run_dir / "checkpoints"

    def steps(self, steps_per_epoch: int) -> int:
        """Optimizer steps of the whole run."""
        return min(self.max_steps or sys.maxsize, self.max_epochs * steps_per_epoch)


def make_trainer(
    config: TrainerConfig,
    loader: TrainLoader,
    evaluates: bool,
    checkpoint_io: CheckpointIO,
    callbacks: Sequence[L.Callback],
    run_dir: Path,
    leads: bool,
) -> L.Trainer:
    """A Trainer for one device; the other ranks' gradients come in through the module."""
    accelerator, devices = _accelerator(config.device)
    return L.Trainer(
        accelerator=accelerator,
        devices=devices,
        max_epochs=config.max_epochs,
        max_steps=config.max_steps or -1,
        val_check_interval=config.interval(config.eval_every, len(loader)) if evaluates else None,
        limit_val_batches=None if evaluates else 0,
        num_sanity_val_steps=0,
        inference_mode=False,  # FBGEMM's CPU lookup has no kernel for inference tensors
        log_every_n_steps=LOG_EVERY,
        logger=_logger(config.logger, run_dir) if leads else False,
        callbacks=[
            *callbacks,
            *(_progress_bar(config) if leads else ()),
            *_checkpointing(config, len(loader), config.checkpoints(run_dir)),
        ],
        plugins=[checkpoint_io],
        enable_progress_bar=config.progress and leads,
        enable_model_summary=False,
        enable_checkpointing=config.checkpoint_every is not None,
        use_distributed_sampler=False,
        default_root_dir=str(run_dir),
    )


def _accelerator(device: str) -> tuple[str, Any]:
    kind, _, index = device.partition(":")
    return ("gpu", [int(index or 0)]) if kind == "cuda" else ("cpu", 1)


def _logger(name: str | None, run_dir: Path) -> Logger | bool:
    if name == "csv":
        return CSVLogger(str(run_dir), name="", version="logs")
    return TensorBoardLogger(str(run_dir), name="", version="logs") if name == "tensorboard" else False


def _progress_bar(config: TrainerConfig) -> list[L.Callback]:
    if not config.progress:
        return []
    return [TerminalProgressBar() if sys.stdout.isatty() else LogProgressBar()]


class PacedProgressBar(ProgressBar):
    """Redraws by the clock, whatever a step takes: a redraw costs as much as a small model's optimizer."""

    seconds = 0.2
    """Between redraws while training."""
    _drawn = 0.0

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Draw if it is time, or if this was the last step."""
        now = perf_counter()
        last = batch_idx + 1 == trainer.num_training_batches or trainer.global_step == trainer.max_steps
        if last or now - self._drawn >= self.seconds:
            self._drawn = now
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)


class TerminalProgressBar(PacedProgressBar, RichProgressBar):
    """For a terminal."""


class LogProgressBar(PacedProgressBar, TQDMProgressBar):
    """For output that is no terminal: the training's bar alone, since every redraw stays in the log."""

    seconds = 2.0

    def init_validation_tqdm(self) -> Tqdm:
        """No bar for evaluations; their figures are printed."""
        return Tqdm(disable=True)


def _checkpointing(config: TrainerConfig, steps: int, directory: Path) -> list[L.Callback]:
    last = config.steps(steps)
    if config.checkpoint_every is None:
        return [StopOnSignal(None, 1, last)]
    every = config.interval(config.checkpoint_every, steps)
    regular = ModelCheckpoint(
        dirpath=directory,
        filename="step-{step:08d}",
        auto_insert_metric_name=False,
        every_n_train_steps=every,
        save_top_k=config.keep_checkpoints,
        monitor="step",
        mode="max",
        save_on_train_epoch_end=False,
        enable_version_counter=False,  # it would look at files that another rank is writing
    )
    return [StopOnSignal(directory, every, last), regular]


def fit(
    trainer: L.Trainer,
    module: RankingModule,
    loader: TrainLoader,
    evaluation: EvalLoader,
    recorder: Recorder,
    resume: Path | None,
) -> str | None:
    """Train, evaluate at the end, and wait for the figures; what to say when a signal stopped it.

    No evaluation where ``make_trainer`` was told that there is none.
    """
    if resume is not None:
        print(f"resuming from {resume}")
    trainer.fit(module, loader, evaluation, ckpt_path=resume)
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    stop = next(c for c in callbacks if isinstance(c, StopOnSignal))
    stop.agree(module.trainers)
    if stop.received is None and trainer.limit_val_batches and recorder.evaluated_at != trainer.global_step:
        trainer.validate(module, evaluation, verbose=False)
    recorder.finish(trainer)
    module.quality.close()
    module.two_cores.close()
    if not recorder.step_seconds:
        print(f"no step was left to train after {trainer.global_step}; raise trainer.max_steps or max_epochs")
    if stop.received is None:
        return None
    where = (
        f"; go on with resume={stop.saved}"
        if stop.saved
        else " (no checkpoint: trainer.checkpoint_every=null)"
    )
    return f"stopped by {signal.Signals(stop.received).name} after step {trainer.global_step}{where}"


class StopOnSignal(L.Callback):
    """SIGTERM, Ctrl-C: finish the step, leave a checkpoint to resume from, end. The second ends at once.

    Also saves after the last step, which the regular interval may not meet. ``directory`` None: saves none.
    """

    def __init__(self, directory: Path | None, every: int, last_step: int) -> None:
        self.directory = directory
        self.every = every
        self.last_step = last_step
        self.received: int | None = None
        self.saved: Path | None = None
        self._before: dict[int, Any] = {}
        self._module: RankingModule | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take the signals over from Lightning, which would stop in the middle of a batch."""
        self._take_over(pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Also for the evaluation after training."""
        self._take_over(pl_module)

    def _take_over(self, module: L.LightningModule) -> None:
        assert isinstance(module, RankingModule)
        self._module = module
        if not self._before:
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            # Not KeyboardInterrupt, which Lightning turns into an exit with status 1.
            raise SystemExit(128 + number)
        self.received = number
        if self._module is not None:
            self._module.stop_asked = True

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save and stop after this step when a signal has come; save after the last step."""
        step = trainer.global_step
        assert isinstance(pl_module, RankingModule)
        stop = pl_module.stop_agreed
        if stop and self.received is None:
            self.received = signal.SIGTERM  # another rank got it
        if not stop and step < self.last_step:
            return
        if stop:
            trainer.should_stop = True
            trainer.limit_val_batches = 0
        if self.directory is not None and self.saved is None:
            self.saved = self.directory / f"step-{step:08d}{SUFFIX}"
            if step % self.every:
                trainer.save_checkpoint(self.saved)

    def agree(self, trainers: Channel) -> None:
        """After training: a signal that came to any trainer has come to all."""
        told = np.concatenate(trainers.gather(np.array([self.received or 0])))
        self.received = int(told.max()) or None

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Give the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()


class Recorder(L.Callback):
    """Times the steps and keeps the learning curve; prints a line for each evaluation as it is known."""

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
        """Samples trained so far."""
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
        self._print_known(trainer)
        self._last = perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hand the predictions to the thread that computes the figures; training goes on."""
        assert isinstance(pl_module, RankingModule)
        seconds = sum(self.step_seconds[self._reported :])
        speed = sum(self.step_samples[self._reported :]) / seconds if seconds > 0 else float("nan")
        self._reported = len(self.step_seconds)
        future = pl_module.quality.submit(trainer.global_step)
        self.evaluated_at = trainer.global_step
        self._waiting.append((trainer.global_step, self.samples, pl_module.take_mean_loss(), speed, future))
        self._last = perf_counter()

    def finish(self, trainer: L.Trainer) -> None:
        """Wait for the figures that are still being computed."""
        self._print_known(trainer, wait=True)

    def _print_known(self, trainer: L.Trainer, wait: bool = False) -> None:
        while self._waiting and (wait or self._waiting[0][4].done()):
            step, samples, loss, speed, future = self._waiting.pop(0)
            quality: Quality = future.result()
            self.history.append(Point(step, samples, quality.auc, quality.logloss, quality.ne, loss, speed))
            line = (
                f"step {step:>6,}  {samples:>11,} samples  train loss {loss:.4f}  AUC {quality.auc:.4f}  "
                f"logloss {quality.logloss:.4f}  NE {quality.ne:.4f}  {speed:,.0f} samples/s"
            )
            bar = trainer.progress_bar_callback
            if isinstance(bar, ProgressBar) and not wait:  # after training its bar prints nothing any more
                bar.print(line)
            else:
                print(line, flush=True)
