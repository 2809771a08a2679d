"""The Shuffle Scheduler's part in training: the held-out loss at the end of each segment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

import lightning as L
import numpy as np
import torch

from recpipe.kit import PlacedModel, batch_size, entries, on_device
from recpipe.plugin import Context, PluginError
from recpipe_fae.prepare import Preparation
from recpipe_fae.schedule import Scheduler, plan


class ShuffleScheduler(L.Callback):
    """Evaluates after each segment and publishes the next rate; its state goes into checkpoints."""

    def __init__(self, ctx: Context, prepared: Preparation, scheduler: Scheduler, samples: int) -> None:
        self.ctx, self.prepared, self.scheduler, self.samples = ctx, prepared, scheduler, samples

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """From now on the loader may wait for decisions; raises ``PluginError`` if none can be made."""
        if self.scheduler.adapts and next(self.ctx.held_out(0), None) is None:
            raise PluginError(
                "plugins.fae.schedule=true needs held-out samples, and the data has none; "
                "hold some out (data.eval_fraction=0.1), or set plugins.fae.schedule=false"
            )
        self.scheduler.go()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Decide if a segment has ended. All trainers use the first one's loss, since losses may differ in
        the last bits."""

        def agreed(loss: float) -> float:
            return float(pl_module.trainers.gather(np.array([loss]))[0][0])

        self.batch_done(pl_module.model, agreed)

    def batch_done(self, model: PlacedModel, agreed: Callable[[float], float] = float) -> None:
        """Count a trained batch; ``agreed`` chooses one loss for all trainers."""
        scheduler, classes = self.scheduler, self.prepared.classes
        scheduler.trained += 1
        cold, hot = classes.batches(False), classes.batches(True)
        epoch_ends = scheduler.trained == cold + hot
        if scheduler.adapts:
            segments = plan(scheduler.rates, cold, hot)
        else:
            segments = plan([], cold, hot, scheduler.start)
        ends = accumulate(segment.stop - segment.start for segment in segments)
        if scheduler.trained in ends:
            scheduler.swaps += not epoch_ends
            if scheduler.adapts:
                scheduler.decide(agreed(self.held_out_loss(model)), epoch_ends=epoch_ends)
        if epoch_ends:
            scheduler.trained = 0

    def held_out_loss(self, model: PlacedModel) -> float:
        """The model's mean loss of the first held-out samples, in whole batches."""
        training, total, seen = model.training, 0.0, 0
        model.eval()
        with torch.no_grad():
            for batch in self.ctx.held_out(0):
                batch = on_device(batch, torch.device(self.ctx.device))
                samples = batch_size(batch)
                loss, _ = model.called(batch)
                total, seen = total + float(loss) * samples, seen + samples
                if seen >= self.samples:
                    break
        model.train(training)
        return total / seen

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Release a waiting loader, since no decision will come."""
        self.scheduler.stop()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """As above."""
        self.scheduler.stop()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """As above."""
        self.scheduler.stop()

    def state_dict(self) -> dict[str, Any]:
        """Rates, losses, the position in the epoch, and the order that the position refers to."""
        return self.scheduler.state_dict() | {"order": self._order()}

    def _order(self) -> dict[str, Any]:
        scheduler = self.scheduler
        return {
            "rate": scheduler.start,
            "schedule": scheduler.adapts,
            "classes": self.prepared.classes.digest,
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """``Damaged`` if the state cannot be a result of ``state_dict``, ``PluginError`` if it is for another
        recipe's order."""
        mine = self._order()
        theirs = entries(dict.fromkeys(mine, bool | float | str), state.get("order"), "order")
        for name in ("rate", "schedule"):
            if theirs[name] != mine[name]:
                raise PluginError(
                    f"the checkpoint was made with plugins.fae.{name}={theirs[name]}, not {mine[name]}: "
                    f"resume with plugins.fae.{name}={theirs[name]}"
                )
        if theirs != mine:
            raise PluginError(
                "the checkpoint was made with other hot rows, so with another order of samples: resume with "
                "its values of tiers.resident_bytes, seed, plugins.fae.sample, hot and threshold"
            )
        self.scheduler.check_state(state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state that ``check_state`` has accepted."""
        self.scheduler.load_state_dict({k: v for k, v in state_dict.items() if k != "order"})
