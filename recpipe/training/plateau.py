"""A learning rate that falls when a figure stops improving."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import lr_scheduler

from recpipe.common.saved import Damaged, entries
from recpipe.plugin.schedule import Schedule
from recpipe.training.config import Monitored

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
        self.scheduler = lr_scheduler.ReduceLROnPlateau(stand_in, **arguments)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Attach the scheduler to the optimizer, which exists now."""
        self.scheduler.optimizer = trainer.optimizers[0]

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Check the figure, except after training."""
        if trainer.state.fn == TrainerFn.FITTING:
            self.scheduler.step(float(trainer.callback_metrics[self.monitor]))

    def state_dict(self) -> dict[str, Any]:
        """The best figure, and how long ago it was."""
        return {key: value for key, value in self.scheduler.state_dict().items() if key in _MOVING}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the saved state, with this recipe's arguments. The rate itself is in the optimizer's
        state."""
        self.scheduler.load_state_dict(state_dict)


class Plateau(ReduceLROnPlateau):
    """The same for the schedule of one optimizer, called ``name``, of dense part or tables, whose rate is
    ``base``. ``rate`` is what it has come to."""

    def __init__(self, name: str, base: float, schedule: Schedule) -> None:
        knobs = ("factor", "patience", "threshold", "cooldown")
        least = min(schedule.min_lr, base)
        super().__init__(
            schedule.monitor,
            mode=Monitored(schedule.monitor, schedule.mode).mode,
            min_lr=least,
            eps=0.0,
            **{knob: getattr(schedule, knob) for knob in knobs},
        )
        self._base = base
        self._own = self.scheduler.optimizer.param_groups[0]
        self._own["lr"] = base
        self._name = name

    @property
    def rate(self) -> float:
        """The rate in force."""
        return float(self._own["lr"])

    @property
    def state_key(self) -> str:
        """A key of its own in checkpoints."""
        return f"{type(self).__qualname__}.{self._name}"

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Do nothing: the rate is here, and ``Rates`` hands it on."""

    def state_dict(self) -> dict[str, Any]:
        """The best figure, how long ago it was, and the rate that has come of the recipe's."""
        return {**super().state_dict(), "base": self._base, "rate": self.rate}

    def check_state(self, state: dict[str, Any]) -> None:
        """``Damaged`` for what is no result of ``state_dict``."""
        kinds = {"best": float, "base": float, "rate": float, **dict.fromkeys(_MOVING[1:], int)}
        found = entries(kinds, state)
        if not 0 <= found["rate"] <= found["base"] or not found["base"]:
            raise Damaged(f"rate is {found['rate']} of {found['base']}")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the saved state. A recipe with another rate begins with that one, lowered as far as
        the saved one was."""
        rate, base = state_dict["rate"], state_dict["base"]
        self._own["lr"] = rate if base == self._base else rate / base * self._base
        super().load_state_dict({key: state_dict[key] for key in _MOVING})
