"""Cuts batches into micro-batches by a plugin's splitter, where that makes steps shorter; ``Trial`` decides
by measured times whether it does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from itertools import pairwise
from statistics import fmean, median

import numpy as np
from numpy.typing import NDArray

from recpipe.common.machine import Load, disturbance
from recpipe.common.timing import milliseconds
from recpipe.distributed.ranks import Channel, Ranks
from recpipe.plugin.batch import Batch
from recpipe.plugin.calls import Owned, blaming
from recpipe.plugin.splitter import Split, Splitter, micro_batch_step, wrong_split
from recpipe.tables.group_rows import GroupTables

LOOKED = 8
"""Of so many batches one is looked at for figures alone."""
AHEAD = 3
"""A decision after a trained batch holds from so many batches later: the next one is ready by then, and the
loader may be reading the one after it."""
WATCHED = 16
"""Steps without the mechanism over which the most that it could save is measured."""
RARE = 2
"""So many of these steps, those that it could save most of, are left out: what delays single steps, as many
new rows at once, is no reason to change all."""
LEAST = 0.03
"""The share of the time that it must be able to save, or it is not tried."""
BLOCK = 6
"""Steps in turn with and without it while it is tried ..."""
SETTLING = 2
"""... of which the first ones do not count: they are of batches that were read before the change."""
PAIRS = 5
"""The most pairs of blocks of one trial."""
CLEAR = 0.08
"""From the second pair on, the trial ends if steps with it are shorter or longer by more than this share."""
COSTLY = 1.25
"""It ends after the first pair if steps with it take more than so many times as long."""
WORTH = 0.98
"""It stays on if a step with it takes at most this share of the time of one without it."""
HOLD = 250
"""Steps after a trial until the next one, at first; each trial doubles them."""
OUTLIER = 3.0
"""Steps so many times longer than the median are left out: an evaluation or a checkpoint came between."""


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
        self.trial = Trial(agreed, load)
        """Under auto; while it compares steps with and without it, their times must be exact."""
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
            seconds = 0.0
            for each in tables:
                seconds += each.times.wait
            return seconds

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

    def looks(self) -> bool:
        """Whether it wants to know which samples of the next batch need cold rows. Where it is not to be cut
        and training does not wait for rows, that is wanted for figures alone; ``pass_by`` is called then."""
        may_pay = self.mode == "auto" and (self.trial.compares or self._waits_now)
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
        self.trial.step(seconds, waited if early is None else min(waited, early * seconds))
        if self.trial.on != self._since[1]:
            self._since = number + AHEAD, self.trial.on, self._since[1]

    def verdict(self) -> str:
        """Whether cutting batches paid, and why, in one sentence."""
        trial = self.trial
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


class Phase(Enum):
    """What the next steps are for."""

    WATCH = "without the mechanism, to see what it could save"
    TRIAL = "with and without it in turn"
    HOLD = "as decided"


class Trial:
    """``on`` says whether to use the mechanism; ``step`` may change it after a trained step.

    The steps at which it may change do not depend on measured times, and all decisions are made of
    ``agreed`` values, so that several trainers decide alike. ``agreed`` gives the largest of a value over all
    of them; it is called by all of them after the same steps.

    ``load`` gives the machine's load, and None to each of several trainers. A decision that was found while
    other programs used the machine is not kept for long: the next trial comes as soon as the one after it
    would have.
    """

    def __init__(
        self,
        agreed: Callable[[float], float] = lambda value: value,
        load: Callable[[], Load | None] = lambda: None,
    ) -> None:
        self.on = False
        self.steps = 0
        self.decided = 0
        """The number of steps at the end of the last trial; 0 before."""
        self.with_it = self.without = 0.0
        """Mean seconds of a step in the last trial."""
        self.disturbed = ""
        """What disturbed the last trial; empty: nothing."""
        self._load, self._began = load, load()
        self.watched = 0
        """How many times ``could_save`` was measured."""
        self.could_save = 0.0
        """The share of the time that it could have saved, in the last steps that were watched, without those
        that are rare."""
        self._agreed = agreed
        self._phase = Phase.WATCH
        self.compares = False
        """Whether it trains with and without the mechanism in turn."""
        self._left = WATCHED
        self._hold = HOLD
        self._saved: list[float] = []
        self._times: dict[bool, list[float]] = {True: [], False: []}
        self._block: list[float] = []
        self._blocks = 0

    def step(self, seconds: float, saving: float) -> None:
        """Note a trained step: its ``seconds``, and the most of them that the mechanism could have saved (if
        it was off)."""
        self.steps += 1
        self._block.append(seconds)
        self._saved.append(min(saving, seconds))
        self._left -= 1
        if self._left:
            return
        if self._phase is Phase.WATCH:
            self.watched += 1
            usually = sorted(zip(self._saved, self._block, strict=True))[:-RARE]
            saved, total = (sum(each) for each in zip(*usually, strict=True))
            self.could_save = self._agreed(saved / max(total, 1e-9))
            self._begin(Phase.TRIAL if self.could_save >= LEAST else Phase.WATCH)
        elif self._phase is Phase.TRIAL:
            self._tried()
        else:
            self._begin(Phase.TRIAL if self.on else Phase.WATCH)

    def _begin(self, phase: Phase) -> None:
        self._phase, self.compares = phase, phase is Phase.TRIAL
        self._left = {Phase.WATCH: WATCHED, Phase.TRIAL: BLOCK, Phase.HOLD: self._hold}[phase]
        self._block, self._saved = [], []
        if phase is Phase.TRIAL:
            self._began = self._load()
            self._times, self._blocks = {True: [], False: []}, 0
            self.on = not self.on

    def _tried(self) -> None:
        """A block of the trial has ended: judge after each pair of them, or try the other way."""
        self._times[self.on] += usual(self._block[SETTLING:])
        self._block, self._saved, self._left = [], [], BLOCK
        self._blocks += 1
        pairs, odd = divmod(self._blocks, 2)
        if not odd:
            self.with_it, self.without = (self._agreed(fmean(self._times[on])) for on in (True, False))
            ratio = self.with_it / max(self.without, 1e-9)
            if (ratio > COSTLY if pairs == 1 else abs(ratio - 1) > CLEAR) or pairs >= PAIRS:
                self.on, self.decided, now = ratio <= WORTH, self.steps, self._load()
                self.disturbed = disturbance(None if now is None else now.others_since(self._began))
                self._begin(Phase.HOLD)
                self._hold *= 1 if self.disturbed else 2
                return
        self.on = not self.on


def usual(seconds: Sequence[float]) -> list[float]:
    """``seconds`` without those far above the median."""
    limit = OUTLIER * median(seconds)
    return [each for each in seconds if each <= limit]
