"""Averages of the weights over the steps of a run, of dense part and tables together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from recpipe.checkpoint.averaged import AVERAGED, Averaged
from recpipe.common.console import log
from recpipe.errors import UserError
from recpipe.plugin.averaging import Averaging, Clock
from recpipe.training.config import TrainerConfig


@dataclass(frozen=True)
class Pace:
    """After which steps the averaging points are: after ``start``, and after ``every`` more each."""

    start: int
    every: int

    @classmethod
    def of(cls, config: TrainerConfig, steps_per_epoch: int) -> Pace:
        """That of ``trainer.ema`` or ``trainer.swa``."""
        chosen = config.ema if config.ema.decay is not None else config.swa
        start, run = chosen.start, config.steps(steps_per_epoch)
        assert start is not None, "there is an average"
        first = start if isinstance(start, int) else max(1, round(start * run))
        if first > run:
            kind = "swa" if chosen is config.swa else "ema"
            log.warning(
                "trainer.%s.start=%s is after this run's last step, %d: it ends without an average; start "
                "earlier, or train longer",
                *(kind, start, run),
            )
        every = chosen.every
        if not isinstance(every, int):
            every = config.interval(every, steps_per_epoch)
        return cls(first, every)

    def points(self, step: int) -> int:
        """How many have passed after ``step``."""
        return 0 if step < self.start else (step - self.start) // self.every + 1


class Averages(L.Callback):
    """Averages the dense part by torch's ``AveragedModel``, tells the tables which points have passed, and
    gives evaluations the averages from the first point on.

    ``dense``: the parameters by name; ``clocks``: of the tables' optimizers. Buffers are not averaged.
    """

    def __init__(
        self, averaging: Averaging, pace: Pace, dense: Mapping[str, nn.Parameter], clocks: Iterable[Clock]
    ) -> None:
        self.averaging, self.pace = averaging, pace
        self._names, self._dense = list(dense), list(dense.values())
        self._clocks = list(clocks)
        decay = averaging.decay
        average = get_swa_multi_avg_fn() if decay is None else get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        self._held = nn.ParameterList(self._dense)
        self._averaged = AveragedModel(self._held, multi_avg_fn=average)
        self._last: list[torch.Tensor] | None = None
        """The weights of the last step, while the model has averages in their place."""

    # -- steps -------------------------------------------------------------------------------

    def _tell(self, before: int, after: int) -> None:
        for clock in self._clocks:
            clock.points = self.pace.points(before), self.pace.points(after)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Tell the tables which points the step passes."""
        self._tell(trainer.global_step, trainer.global_step + 1)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take the dense part in, if the step is followed by a point."""
        step = trainer.global_step
        if self.pace.points(step) > self.pace.points(step - 1):
            self._averaged.update_parameters(self._held)

    # -- evaluations -------------------------------------------------------------------------

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Put averages in the place of weights."""
        self._tell(trainer.global_step, trainer.global_step)
        if not self.pace.points(trainer.global_step):
            return
        self._last = [parameter.detach().clone() for parameter in self._dense]
        self._put(self._averaged.module.parameters())
        self._show(True)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Put the weights of the last step back."""
        if self._last is not None:
            self._put(self._last)
            self._last = None
            self._show(False)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """An evaluation that was cut off is over, too."""
        self.on_validation_end(trainer, pl_module)

    def _show(self, averages: bool) -> None:
        for clock in self._clocks:
            clock.shows = averages

    def _put(self, values: Iterable[torch.Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self._dense, values, strict=True):
                parameter.copy_(value)

    # -- checkpoints -------------------------------------------------------------------------

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the dense averages, and what those of rows count by."""
        found = dict(zip(self._names, self._averaged.module.parameters(), strict=True))
        dense = {name: value.detach().cpu().clone() for name, value in found.items()}
        points = self.pace.points(trainer.global_step)
        kind, decay = self.averaging.kind, self.averaging.decay
        own = Averaged(kind, decay, self.pace.start, self.pace.every, points, dense if points else {})
        checkpoint[AVERAGED] = own.to_dict()

    def check_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """``UserError`` if a checkpoint's averages are others, ``Damaged`` if they are none."""
        saved = Averaged.of(checkpoint)
        here = {"kind": self.averaging.kind, "decay": self.averaging.decay}
        here |= {"start": self.pace.start, "every": self.pace.every}
        if saved is None:
            raise UserError(
                f"the checkpoint has no averages of its weights: resume without trainer.{here['kind']}, or "
                "start anew"
            )
        theirs = {key: getattr(saved, key) for key in here}
        if theirs != here:
            raise UserError(
                f"the checkpoint's weights are averaged by {_words(theirs)}, not {_words(here)}: resume with "
                "the former"
            )
        saved.check_dense(dict(zip(self._names, self._dense, strict=True)))

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Go on from the saved averages."""
        saved = Averaged.of(checkpoint)
        assert saved is not None, "it has been checked"
        self._averaged.n_averaged.fill_(saved.points)
        with torch.no_grad():
            for name, value in zip(self._names, self._averaged.module.parameters(), strict=True):
                if saved.dense:
                    value.copy_(saved.dense[name])


def _words(own: Mapping[str, Any]) -> str:
    keys = (key for key in ("decay", "start", "every") if own[key] is not None)
    return f"trainer.{own['kind']}={{{', '.join(f'{key}: {own[key]}' for key in keys)}}}"
