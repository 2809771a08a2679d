"""What a run really trained, step by step, as a callback sees it after every plugin."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import lightning as L
import numpy as np
from numpy.typing import NDArray

from recpipe.data.content import UInt64, sample_hashes
from recpipe.data.select import select
from recpipe.pipeline.batch import InFlight
from recpipe.plugin.tables import to_numpy
from recpipe.testing.process import Others, Process, draw, random_state

Moves = dict[str, NDArray[Any]]
"""Which rows a batch moves in one group of tables: ``slots`` that get the rows ``placed``, slots ``vacated``
by the rows ``evicted`` (-1: the slot was empty), and the rows that pass through the ``slab``."""
_MOVES = ("slots", "placed", "vacated", "evicted", "slab")


@dataclass
class Step:
    """One optimizer step of this rank."""

    epoch: int
    batch: Any
    """A copy of its samples, in the order in which they were trained."""
    content: UInt64
    """A hash of each sample's whole content, uint64 [n]."""
    outside: UInt64
    """A hash of each sample without its ids, uint64 [n]."""
    bounds: tuple[int, ...]
    """Where its micro-batches end; empty for one."""
    moves: list[Moves | None]
    """For each group of tables; None for a group that recpipe's tiers do not hold."""
    loss: float = float("nan")
    random: tuple[str, ...] = ()
    """Hashes of the global random numbers' states before the step and after it."""


@dataclass
class Record:
    """The steps of a run."""

    steps: list[Step] = field(default_factory=list)
    whole: set[int] = field(default_factory=set)
    """Epochs that came to their end; ``trainer.max_steps`` may end a run within an epoch."""
    first: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    """The dense parameters before the first step, by name."""
    changed: dict[str, int] = field(default_factory=dict)
    """What was changed in the process while it trained or evaluated, with the step in which it was first
    seen."""

    def of_epoch(self, epoch: int) -> list[Step]:
        """The steps of ``epoch``."""
        return [step for step in self.steps if step.epoch == epoch]


class Watch(L.Callback):
    """Keeps a ``Record``."""

    latest: Record | None = None
    """The record of this process's latest run."""
    process: Process | None = None
    """If a run has a process of its own: that process, as it was before the run."""
    others: Others | None = None

    def __init__(self) -> None:
        self.record = Record()

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Keep the dense parameters, as they were initialized or read from a checkpoint."""
        Watch.latest = self.record
        parameters = pl_module.model.dense_parameters()
        self.record.first = {name: to_numpy(value).copy() for name, value in parameters.items()}
        self._look(self.others)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: InFlight, batch_idx: int
    ) -> None:
        """Keep the batch before it is trained."""
        plans = [None if rows is None else rows.plan for rows in batch.groups or ()] if batch.moving else []
        moves = [None if plan is None else {n: getattr(plan, n).copy() for n in _MOVES} for plan in plans]
        kept = select(batch.batch, np.arange(batch.size))
        hashes = sample_hashes(kept), sample_hashes(kept, ids=False)
        step = Step(trainer.current_epoch, kept, *hashes, tuple(batch.bounds), moves, random=random_state())
        self.record.steps.append(step)
        self._look(self.process)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the batch's loss."""
        self.record.steps[-1].loss = float(outputs["loss"])
        self.record.steps[-1].random += random_state()
        self._look(self.process)
        if self.process is not None:
            draw()  # so that to seed anew, even as the run was seeded, is another state than this

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        """Look at the process within a step."""
        self._look(self.process)

    def on_validation_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        """Look at the process within an evaluation."""
        self._look(self.process)

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Look at another plugin's knobs."""
        self._look(self.others)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note whether the epoch came to its end."""
        done = len(self.record.of_epoch(trainer.current_epoch))
        if done >= trainer.num_training_batches or trainer.global_step != trainer.max_steps:
            self.record.whole.add(trainer.current_epoch)

    def _look(self, at: Process | Others | None) -> None:
        if at is not None:
            for what in at.changed():
                self.record.changed.setdefault(what, len(self.record.steps))
