"""Cuts batches into micro-batches by a plugin's splitter, where that makes steps shorter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from recpipe.common.machine import Load
from recpipe.common.timing import milliseconds
from recpipe.distributed.ranks import Channel, Ranks
from recpipe.pipeline.trial import LEAST, WORTH, Trial
from recpipe.plugin.batch import Batch
from recpipe.plugin.calls import Owned, blaming
from recpipe.plugin.splitter import Split, Splitter, micro_batch_step, wrong_split
from recpipe.tables.group_rows import GroupTables

LOOKED = 8
"""Of so many batches one is looked at for figures alone."""
AHEAD = 3
"""A decision after a trained batch holds from so many batches later: the next one is ready by then, and the
loader may be reading the one after it."""


class EqualParts(Splitter):
    """Micro-batches of ``size`` samples, in the batch's order (``trainer.accumulate_grad_batches``)."""

    optional = False

    def __init__(self, size: int) -> None:
        self.size = size

    def split(self, batch: Batch, needs_cold: NDArray[np.bool_]) -> Split:
        """Cut the batch; the last part may be smaller."""
        samples = len(needs_cold)
        return Split(np.arange(samples), (*range(self.size, samples, self.size), samples))


class Splitting:
    """Asks ``splitter`` for each batch. Its answer is used under ``mode`` always, not under never, and under
    auto while that pays.

    Cutting costs small matrix products and two passes. It can save what training waits for cold rows, at most
    the time of the samples that need none. ``Trial`` weighs both in trained steps. Micro-batches are rounded
    down to multiples of ``step`` samples. ``waited`` gives the seconds for which training has waited for cold
    rows so far; ``agreed`` and ``load`` are as in ``Trial``.
    """

    def __init__(
        self,
        splitter: Owned[Splitter],
        mode: str,
        step: int,
        waited: Callable[[], float] = lambda: 0.0,
        agreed: Callable[[float], float] = lambda value: value,
        load: Callable[[], Load | None] = lambda: None,
    ) -> None:
        self._splitter = splitter
        with blaming(splitter.origin, f"{splitter.label}.optional"):  # which may be a property
            optional = splitter.part.optional
        self.mode = mode if optional or mode != "auto" else "always"
        self._step = step
        self._waited = waited
        self._trial = Trial(agreed, load)
        self._since = 0, self.mode == "always", self.mode == "always"
        """The number of a batch, and whether batches from it on, and those before it, are cut. Replaced as a
        whole, since the loader's thread reads it."""
        self._next = self._trained = 0
        self._early: dict[int, float | None] = {}
        """For each batch that was read and not trained: the share of its samples that would be in the first
        micro-batch, 0 if it cannot be cut; None if it was not looked at."""
        self._waited_before = 0.0
        self._waits_now = False
        """Whether training has waited for cold rows of the latest batch."""
        self._early_sum = self._seconds = self._waits = 0.0
        self._looked = 0
        self.batches = 0
        """How many batches were cut."""

    @classmethod
    def of(
        cls,
        splitter: Owned[Splitter] | None,
        mode: str,
        batch_size: int,
        tables: Sequence[GroupTables],
        trainers: Channel,
    ) -> Splitting | None:
        """The splitting of a run's plugins under ``trainer.split=mode``; None without a splitter. All
        ``trainers`` decide alike."""
        if splitter is None:
            return None

        def agreed(value: float) -> float:
            return max(float(each[0]) for each in trainers.gather(np.array([value])))

        def waited() -> float:
            return sum(each.waited for each in tables)

        # Several ranks on a machine are other programs to each other.
        load = Load.now if trainers.size == 1 else lambda: None
        if isinstance(splitter.part, EqualParts):
            return cls(splitter, "always", 1, waited, agreed, load)
        return cls(splitter, mode, micro_batch_step(batch_size), waited, agreed, load)

    def begin_epoch(self, number: int) -> None:
        """The next batch has this ``number``, counted over all epochs."""
        self._next = self._trained = number
        self._early.clear()
        self._waited_before = self._waited()

    @property
    def compares(self) -> bool:
        """Whether steps with and without it are being compared, so that their times must be exact."""
        return self.mode == "auto" and self._trial.compares

    def looks(self) -> bool:
        """Whether it wants to know which samples of the next batch need cold rows. Where it is not to be cut
        and training does not wait for rows, that is wanted for figures alone; ``pass_by`` is called then."""
        may_pay = self.mode == "auto" and (self._trial.compares or self._waits_now)
        return self._cuts(self._next) or may_pay or self._next % LOOKED == 0

    def _cuts(self, number: int) -> bool:
        since, on, before = self._since
        return on if number >= since else before

    def pass_by(self) -> None:
        """The next batch is not looked at, nor cut."""
        self._early[self._next] = None
        self._next += 1

    def cut(self, batch: Batch, needs_cold: NDArray[np.bool_]) -> Split | None:
        """How to cut the next batch, whose samples need cold rows or not, bool [B]; None: not at all."""
        number, self._next = self._next, self._next + 1

        def wrong(made: Split) -> str | None:
            said = wrong_split(made, len(needs_cold))
            return f": split() returned {said}" if said else None

        split = self._splitter.call(Splitter.split, batch, needs_cold, wrong=wrong)
        bounds = in_steps(split.bounds, self._step)
        whole = len(bounds) == 1
        self._early[number] = 0.0 if whole else bounds[0] / len(needs_cold)
        if whole or not self._cuts(number):
            return None
        self.batches += 1
        return Split(split.order, bounds)

    def trained(self, seconds: float) -> None:
        """Note the next trained batch, and the seconds from its start to the start of the one after it."""
        number, self._trained = self._trained, self._trained + 1
        early = self._early.pop(number)
        if self.mode != "auto":
            return
        before, self._waited_before = self._waited_before, self._waited()
        waited = self._waited_before - before
        self._waits_now = waited > LEAST * seconds
        self._early_sum += early or 0.0
        self._looked += early is not None
        self._seconds += seconds
        self._waits += waited
        self._trial.step(seconds, waited if early is None else min(waited, early * seconds))
        if self._trial.on != self._since[1]:
            self._since = number + AHEAD, self._trial.on, self._since[1]

    def verdict(self) -> str:
        """Whether cutting batches paid, and why, in one sentence."""
        trial = self._trial
        if self.mode != "auto":
            return f"splitting {'on' if self.mode == 'always' else 'off'}: trainer.split={self.mode}"
        if trial.decided:
            on = trial.with_it <= WORTH * trial.without
            times = f"{milliseconds(trial.with_it)} ms a batch with it, {milliseconds(trial.without)} without"
            while_ = f", while {trial.disturbed}" if trial.disturbed else ""
            return f"splitting {'on' if on else 'off'} after {trial.decided} batches: {times}{while_}"
        if not trial.watched or trial.compares:
            return f"splitting off: the run ended after {trial.steps} batches, before it could be judged"
        waits = self._waits / max(self._seconds, 1e-9)
        if waits < LEAST:
            return f"splitting off: fetches were hidden or short, training waited {waits:.1%} of its time"
        early = self._early_sum / max(1, self._looked)
        if early < LEAST:
            return (
                f"splitting off: {early:.1%} of the samples need no cold row, too few to hide the waits, "
                f"{waits:.1%} of the time"
            )
        return f"splitting off: training waited {waits:.1%} of its time, but in few of its batches"


def share_of(
    split: Split, needs_cold: NDArray[np.bool_], ranks: Ranks
) -> tuple[NDArray[np.int64], tuple[int, ...], int]:
    """This rank's share of every micro-batch of ``split``, so that all trainers go through them together.

    Returns positions in the batch (int64 [n], may be empty), where the micro-batches end in these (some may
    be empty), and the number of the first micro-batch in which a sample of any trainer needs cold rows.
    ``needs_cold`` [B] is in the batch's own order.
    """
    parts = [slice(low, high) for low, high in pairwise((0, *split.bounds))]
    own = [ranks.shares(part.start, part.stop)[ranks.trainer] for part in parts]
    cold = [bool(needs_cold[split.order[part]].any()) for part in parts]
    samples = np.concatenate([split.order[part] for part in own])
    ends = np.cumsum([part.stop - part.start for part in own]).tolist()
    return samples, tuple(ends), cold.index(True) if any(cold) else len(cold)


def in_steps(bounds: tuple[int, ...], step: int) -> tuple[int, ...]:
    """``bounds`` of micro-batches, all but the last rounded down to multiples of ``step``; none is empty."""
    inner = {bound // step * step for bound in bounds[:-1]} - {0, bounds[-1]}
    return (*sorted(inner), bounds[-1])
