"""What a run shows while it trains: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
from time import perf_counter
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from recpipe.training.config import TrainerConfig


def progress_bar(config: TrainerConfig) -> list[L.Callback]:
    """The bar that fits the output, if the recipe wants one."""
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
