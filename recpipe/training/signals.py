"""Ctrl-C and SIGTERM: the step ends, a checkpoint is left, the run stops."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import numpy as np

from recpipe.checkpoint import SUFFIX
from recpipe.model.module import RankingModule
from recpipe.ranks import Channel


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
