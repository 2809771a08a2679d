"""A learning rate that falls when a figure stops improving."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import lr_scheduler

_MOVING = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")


class ReduceLROnPlateau(L.Callback):
    """``torch.optim.lr_scheduler.ReduceLROnPlateau`` on the dense optimizer; the tables keep their rate.

    ``monitor`` names the figure, which is checked after each evaluation during training. The other
    ``arguments`` (mode, factor, patience, threshold, cooldown, min_lr) are the scheduler's, which raises
    TypeError or ValueError for wrong ones. Its state, such as how long the figure has not improved, is in
    checkpoints.
    """

    def __init__(self, monitor: str = "val/logloss", **arguments: Any) -> None:
        self.monitor = monitor
        # There is no optimizer yet, but wrong arguments should be refused now.
        stand_in = torch.optim.SGD([torch.zeros(1)])
        self._scheduler = lr_scheduler.ReduceLROnPlateau(stand_in, **arguments)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Attach the scheduler to the optimizer, which exists now."""
        self._scheduler.optimizer = trainer.optimizers[0]

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Check the figure, except after training."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._scheduler.step(float(trainer.callback_metrics[self.monitor]))

    def state_dict(self) -> dict[str, Any]:
        """The best figure, and how long ago it was."""
        return {key: value for key, value in self._scheduler.state_dict().items() if key in _MOVING}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the saved state, with this recipe's arguments. The rate itself is in the optimizer's
        state."""
        self._scheduler.load_state_dict(state_dict)
