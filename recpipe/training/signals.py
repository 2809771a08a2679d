"""Ctrl-C and SIGTERM: the step or the evaluation ends, a checkpoint is left, the run stops."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import numpy as np

from recpipe.checkpoint.table_io import SUFFIX
from recpipe.distributed.launch import Process
from recpipe.distributed.ranks import Channel
from recpipe.training.module import EvaluationStopped, RankingModule

NUMBERS = (signal.SIGTERM, signal.SIGINT)


class _Interrupted(BaseException):
    """Not KeyboardInterrupt, which Lightning turns into an exit with status 1."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C and SIGTERM leave it with KeyboardInterrupt, where ``StopOnSignal`` has not taken them over.

    Nothing of the sort where there are several processes: one that waits for a message of another could not
    hear SIGTERM any more, by which torchrun ends it. Nor in a thread: signals are the main one's.
    """
    if Process.current().world > 1 or not _hears_signals():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _Interrupted

    before = {number: signal.signal(number, interrupt) for number in NUMBERS}
    try:
        yield
    except _Interrupted:
        raise KeyboardInterrupt from None
    finally:
        _put_back(before)


def _put_back(handlers: Mapping[Any, Any]) -> None:
    for number, handler in handlers.items():
        if handler is not None:  # of a program that is not Python
            signal.signal(number, handler)


def _hears_signals() -> bool:
    return threading.current_thread() is threading.main_thread()


class StopOnSignal(L.Callback):
    """SIGTERM, Ctrl-C: finish the step or the evaluation's batch, leave a checkpoint to resume from, end.

    The second signal ends at once. Also saves where training ends, which the regular interval may not
    meet. ``directory`` None: saves none. ``every``: steps between the regular checkpoints.
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
        if not self._before and _hears_signals():
            for number in NUMBERS:
                self._before[number] = signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise SystemExit(128 + number)
        self.received = number
        if self._module is not None:
            self._module.stop_asked = True

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save and stop after this step when a signal has come; save after the last step."""
        assert isinstance(pl_module, RankingModule)
        if pl_module.stop_agreed:
            self._hear_of_it()
            trainer.should_stop = True
            trainer.limit_val_batches = 0
        if trainer.should_stop or trainer.global_step >= self.last_step:
            self._save(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save where a callback has found, by the figures, that training is to end here."""
        if trainer.should_stop:
            self._save(trainer)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Save where an evaluation was stopped; whoever resumes makes it anew."""
        if isinstance(exception, EvaluationStopped):
            self._hear_of_it()
            self._save(trainer)
        self._give_back()

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Between a step and its evaluation, or within it: an evaluation in its first batch.

        That Lightning makes on resuming, and whole. It would leave the first one out and cut the second one
        short, and what monitors their figures would go another way.
        """
        loops = checkpoint["loops"]["fit_loop"]
        trained, evaluated = loops["epoch_loop.batch_progress"], loops["epoch_loop.val_loop.batch_progress"]
        now, done = trained["current"], evaluated["current"]
        before = now["completed"] < now["processed"] and sum(trainer.num_val_batches)
        before = before and now["processed"] % trainer.val_check_batch == 0
        if before or done["processed"] < done["started"]:
            for count in ("total", "current"):
                trained[count]["completed"] = trained[count]["processed"]
                evaluated[count] = {"ready": 1, "started": 1, "processed": 0, "completed": 0}

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Give the signals back."""
        self._give_back()

    def agree(self, trainers: Channel) -> None:
        """After training: a signal that came to any trainer has come to all."""
        told = np.concatenate(trainers.gather(np.array([self.received or 0])))
        self.received = int(told.max()) or None

    def _hear_of_it(self) -> None:
        if self.received is None:
            self.received = signal.SIGTERM  # another rank got it

    def _save(self, trainer: L.Trainer) -> None:
        if self.directory is None or self.saved is not None:
            return
        step = trainer.global_step
        self.saved = self.directory / f"step-{step:08d}{SUFFIX}"
        if step % self.every:  # else the regular one is
            trainer.save_checkpoint(self.saved)

    def _give_back(self) -> None:
        _put_back(self._before)
        self._before.clear()
