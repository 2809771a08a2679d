"""Ctrl-C and SIGTERM: the run finishes the step or the evaluation's batch, saves a checkpoint and stops."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any

import lightning as L
import numpy as np

from recpipe.checkpoint.table_io import SUFFIX
from recpipe.data.dataset import WaitingStopped
from recpipe.distributed.launch import ProcessRank
from recpipe.distributed.ranks import Channel
from recpipe.errors import Interruption, UserError, shown
from recpipe.training.evaluation import EvaluationStopped
from recpipe.training.module import RankingModule

NUMBERS = (signal.SIGTERM, signal.SIGINT)


class _Interrupted(Interruption):
    """Used instead of KeyboardInterrupt, which Lightning turns into an exit with status 1."""


class _AtOnce(Interruption, SystemExit):
    """A second signal has come."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C and SIGTERM end the block by KeyboardInterrupt, unless ``StopOnSignal`` handles them.

    It does nothing with several processes, since torchrun ends them by SIGTERM, and a process that waits for
    another's message could not handle it. It also does nothing in other threads than the main one, which
    alone handles signals.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if ProcessRank.current().world > 1 or not in_main:
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


@contextmanager
def exits_told() -> Iterator[None]:
    """``sys.exit`` by a model, a data source or a library in the block is a ``UserError``: the run has not
    come to its end, and must not end as if it had."""
    try:
        yield
    except Interruption:
        raise
    except SystemExit as stop:
        if isinstance(stop.__context__, KeyboardInterrupt):  # Lightning's way to end after one
            raise
        frame, line = list(walk_tb(stop.__traceback__))[-1]
        raise UserError(
            f"sys.exit({shown(stop.code)}) was called inside the run, which did not come to its end "
            f"({frame.f_code.co_filename}, line {line})"
        ) from stop


def _put_back(handlers: Mapping[Any, Any]) -> None:
    for number, handler in handlers.items():
        if handler is not None:  # set by a program that is not Python
            signal.signal(number, handler)


class StopOnSignal(L.Callback):
    """On SIGTERM or Ctrl-C: finishes the step or the evaluation's batch, saves a checkpoint, and ends the
    run.

    A second signal ends the run at once. It also saves a checkpoint when training ends, unless the regular
    interval does. ``directory`` None: it saves none. ``every``: steps between the regular checkpoints.
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
        """Take the signals over for the evaluation after training, too."""
        self._take_over(pl_module)

    def _take_over(self, module: L.LightningModule) -> None:
        assert isinstance(module, RankingModule)
        self._module = module
        if not self._before and threading.current_thread() is threading.main_thread():
            for number in NUMBERS:
                self._before[number] = signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise _AtOnce(128 + number)
        self.received = number
        if self._module is not None:
            self._module.stop.asked = True
            self._module.loader.source.dataset.interrupt()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save and stop after this step if a signal has come, or if a stream ended with its batch; save after
        the last step."""
        assert isinstance(pl_module, RankingModule)
        if pl_module.stop.agreed:
            self.received = self.received or signal.SIGTERM  # another rank may have got the signal
            trainer.should_stop = True
            trainer.limit_val_batches = 0
        if pl_module.loader.source.dataset.last_batch == pl_module.totals.batches:
            trainer.should_stop = True
        if trainer.should_stop or trainer.global_step >= self.last_step:
            self._save(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save if a callback has decided, by the figures, that training ends here."""
        if trainer.should_stop:
            self._save(trainer)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Save if an evaluation was stopped, which a resumed run repeats, or the wait for records."""
        trained = self._module is not None and self._module.totals.steps > 0
        if isinstance(exception, EvaluationStopped) or (isinstance(exception, WaitingStopped) and trained):
            self.received = self.received or signal.SIGTERM
            self._save(trainer)
        self.teardown(trainer, pl_module, "")

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Mark a checkpoint between a step and its evaluation, or within it, as one in the evaluation's first
        batch.

        Lightning then repeats the whole evaluation after resuming. Otherwise it would skip the first kind and
        shorten the second, and callbacks that monitor the figures would decide differently.
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
        else:
            # A run that began with such an evaluation has started one batch more than it completed as long
            # as the epoch lasts; it must not look as if it were in an evaluation.
            whole = evaluated["total"]["completed"]
            evaluated["total"].update(ready=whole, started=whole, processed=whole)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Restore the signal handlers."""
        _put_back(self._before)
        self._before.clear()

    def agree(self, trainers: Channel) -> None:
        """After training, tell all trainers about a signal that came to any of them."""
        told = np.concatenate(trainers.gather(np.array([self.received or 0])))
        self.received = int(told.max()) or None

    def _save(self, trainer: L.Trainer) -> None:
        if self.directory is None or self.saved is not None:
            return
        step = trainer.global_step
        self.saved = self.directory / f"step-{step:08d}{SUFFIX}"
        if step % self.every:  # otherwise the regular one is
            trainer.save_checkpoint(self.saved)
