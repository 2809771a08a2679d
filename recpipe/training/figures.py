"""Gives figures to loggers and monitoring callbacks, under the step that they belong to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn

from recpipe.errors import UserError
from recpipe.report.figures import shown_figures
from recpipe.training.module import LossTotal, RankingModule
from recpipe.training.recorder import Recorder

LOG_EVERY = 50
"""Steps between a run's training figures; logging each step would slow small models down."""


class FigureLogger(L.Callback):
    """Passes figures to the trainer's loggers and, as ``trainer.callback_metrics``, to other callbacks.

    ``train/loss`` (mean since the last time) and ``train/samples_per_second`` every ``LOG_EVERY`` steps, with
    each evaluation and after the last step; with each evaluation ``val/loss`` and the figures that fit the
    model: ``val/auc``, ``val/logloss`` and ``val/ne``, or ``val/mse``, ``val/rmse`` and ``val/mae``, or
    ``val/poisson_deviance``. Their step is ``trainer.global_step``, the optimizer steps done. ``self.log`` is
    not used: its steps are one less, and it slows every step. Place this after ``recorder``, whose clock it
    uses.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._loss = LossTotal()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: object) -> None:
        """Log every ``LOG_EVERY`` steps, counted from the run's beginning, also if it was resumed."""
        if trainer.global_step % LOG_EVERY == 0:
            _hand_on(trainer, self._training(pl_module))

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the evaluation's figures, also those of the one after training."""
        assert isinstance(pl_module, RankingModule)
        figures = asdict(pl_module.evaluation.result())
        quality = {f"val/{name}": figures[name] for name in {*shown_figures([figures]), "loss"}}
        _hand_on(trainer, self._training(pl_module) | quality)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Raise a clear error if a callback monitors a figure that is not logged, instead of its
        traceback."""
        there = {*trainer.callback_metrics, "step", "epoch"}
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks if trainer.state.fn == TrainerFn.FITTING else ():
            monitor = getattr(callback, "monitor", None)
            if monitor is not None and monitor not in there and getattr(callback, "strict", True):
                raise UserError(
                    f"trainer.callbacks: {type(callback).__name__} monitors '{monitor}', which nothing logs; "
                    f"there are {', '.join(sorted(there))}"
                )

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the figures of the steps since the last time."""
        _hand_on(trainer, self._training(pl_module))

    def _training(self, module: L.LightningModule) -> dict[str, float]:
        """The figures of the steps since the last call; empty if there are none."""
        assert isinstance(module, RankingModule)
        before, self._loss = self._loss, module.totals.loss_so_far()
        loss = self._loss.mean_since(before)
        if math.isnan(loss):
            return {}
        return {"train/loss": loss, "train/samples_per_second": self.recorder.speed_since(before.steps)}


def _hand_on(trainer: L.Trainer, figures: Mapping[str, float]) -> None:
    if not figures:
        return
    trainer.callback_metrics.update(
        {name: torch.tensor(value, dtype=torch.float64) for name, value in figures.items()}
    )
    for logger in trainer.loggers:
        logger.log_metrics({**figures, "epoch": trainer.current_epoch}, step=trainer.global_step)
        logger.save()
