"""FAE's part in training: the slice's loss at the end of each segment, and the times of mini-batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from itertools import accumulate
from time import perf_counter
from typing import Any

import lightning as L
import numpy as np
import torch

from recpipe.kit import PlacedModel, batch_size, entries, on_device
from recpipe.plugin import Context, PluginError
from recpipe_fae.estimate import COLD, HOT, KEPT, MIXED, expected
from recpipe_fae.prepare import Preparation
from recpipe_fae.schedule import Scheduler

_ORDER = {
    "rate": float,
    "schedule": bool,
    "separates": bool,
    "phases": str,
    "slice_from": int | None,
    "classes": str,
}
"""What decides on the order of samples, and the entries' types in a checkpoint."""


class ShuffleScheduler(L.Callback):
    """Decides after each segment; its state goes into checkpoints.

    The slice are the last training samples of the epoch. They train at its end, after the last decision, so
    that a decision reads the loss of samples before the epoch trains them. The evaluation part is never read.
    """

    def __init__(self, ctx: Context, prepared: Preparation, scheduler: Scheduler) -> None:
        self.ctx, self.prepared, self.scheduler = ctx, prepared, scheduler
        self.steps = tuple(deque[float](maxlen=KEPT) for _ in (COLD, HOT, MIXED))
        """Seconds of the newest steps of each kind, without those in which something else happened."""
        self._since: float | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """From now on the loader may wait for decisions."""
        self.scheduler.go()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The step in which an evaluation happens is not timed."""
        self._since = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Decide if a segment has ended. All trainers use what the first one has measured, since losses may
        differ in the last bits, and times do."""

        def agreed(value: float) -> float:
            return float(pl_module.trainers.gather(np.array([value]))[0][0])

        self.batch_done(pl_module.model, agreed)

    def batch_done(self, model: PlacedModel, agreed: Callable[[float], float] = float) -> None:
        """Count a trained batch; ``agreed`` chooses one value for all trainers."""
        if not self.prepared.separates:
            return
        scheduler, sizes = self.scheduler, self.prepared.sizes
        segments, complete = scheduler.plan(sizes)
        ends = list(accumulate(map(len, segments)))
        number = next((n for n, end in enumerate(ends) if scheduler.trained < end), len(ends))
        plain = scheduler.plain_from is not None
        now = perf_counter()
        if self._since is not None:
            self.steps[MIXED if plain else HOT if segments[number].hot else COLD].append(now - self._since)
        self._since = now
        scheduler.trained += 1
        epoch_ends = scheduler.trained == sizes.all
        if not plain and scheduler.trained == ends[number]:
            if not scheduler.judged and (number == 1 or epoch_ends):
                found = expected(self.steps, self.prepared.estimate)
                # Without a measurement, in an epoch of a few batches, phases go on.
                scheduler.judge(found is None or agreed(float(found.gain)) >= 1)
            if scheduler.plain_from is None:
                tails = (sizes.cold_tail > 0) + (sizes.hot_tail > 0)
                if scheduler.adapts and not (complete and number >= len(segments) - tails):
                    scheduler.decide(agreed(self.slice_loss(model)))
                coming = scheduler.plan(sizes)[0][number + 1 :]
                scheduler.swaps += bool(coming) and coming[0].hot != segments[number].hot
            self._since = None
        if epoch_ends:
            scheduler.end_epoch()
            self._since = None

    def slice_loss(self, model: PlacedModel) -> float:
        """The model's mean loss of the slice."""
        training, total, seen = model.training, 0.0, 0
        assert self.prepared.slice_from is not None, "only a schedule that adapts asks for it"
        model.eval()
        with torch.no_grad():
            for batch in self.ctx.batches(self.prepared.slice_from):
                batch = on_device(batch, torch.device(self.ctx.device))
                samples = batch_size(batch)
                loss, _ = model.called(batch)
                total, seen = total + float(loss) * samples, seen + samples
        model.train(training)
        return total / seen

    # However training ends, a waiting loader is released, since no decision will come.

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.scheduler.stop()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.scheduler.stop()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.scheduler.stop()

    def state_dict(self) -> dict[str, Any]:
        """Rates, losses, the position in the epoch, and the order that the position refers to."""
        return self.scheduler.state_dict() | {"order": self._order()}

    def _order(self) -> dict[str, Any]:
        scheduler, prepared = self.scheduler, self.prepared
        return {
            "rate": scheduler.start,
            "schedule": scheduler.adapts,
            "separates": prepared.separates,
            "phases": prepared.phases,
            "slice_from": prepared.slice_from,
            "classes": prepared.classes.digest if prepared.separates else "",
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """``Damaged`` if the state cannot be a result of ``state_dict``, ``PluginError`` if it is for another
        recipe's order."""
        mine, theirs = self._order(), entries(_ORDER, state.get("order"), "order")
        for name in ("rate", "schedule", "phases"):
            if theirs[name] != mine[name]:
                raise PluginError(
                    f"the checkpoint was made with plugins.fae.{name}={theirs[name]}, not {mine[name]}: "
                    f"resume with plugins.fae.{name}={theirs[name]}"
                )
        if theirs != mine:
            raise PluginError(
                "the checkpoint was made with other hot rows, so with another order of samples: resume with "
                "its values of tiers.resident_bytes, seed, plugins.fae.sample, hot, threshold, loss_samples"
            )
        self.scheduler.check_state(state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state that ``check_state`` has accepted."""
        self.scheduler.load_state_dict({k: v for k, v in state_dict.items() if k != "order"})
