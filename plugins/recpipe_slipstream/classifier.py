"""Slipstream's three blocks: snapshots, which measure how far each hot row moved during a window of batches;
sampling, which finds the threshold with which the wanted share of hot inputs is stale; and the input
classifier, which finds a batch's stale inputs, in the loader's thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from recpipe.kit import batch_size
from recpipe.plugin import Bags, Batch, RowIds

Scores = NDArray[np.float32]
BAND = 0.08
"""The authors' search accepts a sampled share that differs from the wanted one by at most this."""


@dataclass(frozen=True)
class Changes:
    """The rows that were hot at both ends of a window, and how far they moved."""

    rows: RowIds
    """Global row numbers, sorted, int64 [n]."""
    delta: NDArray[np.float32]
    """max_d |S1 - S0| of each row, float32 [n]; infinite for a row that was looked up too few times to
    tell."""

    def stale(self, threshold: float) -> NDArray[np.bool_]:
        """Which of ``rows`` are stale: every dimension moved by less than ``threshold``."""
        return self.delta < np.float32(threshold)

    def of(self, rows: RowIds) -> NDArray[np.float32]:
        """The change of each of ``rows`` (in any order, with repeats); NaN for a row that is not hot."""
        if not len(self.rows):
            return np.full(len(rows), np.nan, np.float32)
        place = np.minimum(np.searchsorted(self.rows, rows), len(self.rows) - 1)
        return np.where(self.rows[place] == rows, self.delta[place], np.float32(np.nan))


def changes(
    before: RowIds, moved: tuple[RowIds, NDArray[np.float32]], touches: NDArray[np.int64], min_touches: int
) -> Changes:
    """The changes of rows that were resident ``before`` the window and after it, from how far they have
    ``moved``. ``touches`` has the window's number of lookups of each of ``before`` (sorted).

    A row with fewer than ``min_touches`` lookups had no chance to move, so it never counts as stale. With 0,
    a row without lookups counts as stale, as in the authors' code.
    """
    rows, delta = moved
    delta = delta.copy()
    delta[touches[np.searchsorted(before, rows)] < min_touches] = np.inf
    return Changes(rows, delta)


def count_touches(touches: NDArray[np.int64], rows: RowIds, looked_up: RowIds) -> None:
    """Add a batch's lookups of ``rows`` (sorted) to ``touches``, in place."""
    if len(rows):
        place = np.minimum(np.searchsorted(rows, looked_up), len(rows) - 1)
        touches += np.bincount(place[rows[place] == looked_up], minlength=len(rows))


def samples_of(bags: Bags) -> NDArray[np.int64]:
    """The sample that each lookup belongs to, int64 [L]."""
    features = (len(bags.offsets) - 1) // bags.batch_size if bags.batch_size else 0
    return np.repeat(np.tile(np.arange(bags.batch_size), features), np.diff(bags.offsets))


def input_scores(changes: Changes, bags: Bags, stale_lookups: int | None) -> Scores:
    """For each hot input of a batch, the threshold above which it is stale, float32 [hot inputs].

    That is the alpha-th smallest change among its rows, alpha = ``stale_lookups`` (None: all of its
    lookups, so the largest change). It is infinite if no threshold makes the input stale. An input is hot if
    it has lookups, all of hot rows.
    """
    sample, change = samples_of(bags), changes.of(bags.rows)
    lookups = np.bincount(sample, minlength=bags.batch_size)
    cold = np.bincount(sample[np.isnan(change)], minlength=bags.batch_size)
    hot = np.flatnonzero((cold == 0) & (lookups > 0))
    ordered = np.append(change[np.lexsort((change, sample))], np.float32(np.inf))
    starts = np.cumsum(lookups) - lookups
    wanted = lookups if stale_lookups is None else np.full(bags.batch_size, stale_lookups)
    picks = np.where(wanted <= lookups, starts + wanted - 1, len(change))
    return ordered[picks[hot]]


def stale_share(scores: Scores, threshold: float) -> float:
    """The share of sampled hot inputs that ``threshold`` makes stale; it does not fall as the threshold
    grows. 0 without inputs."""
    return float(np.mean(scores < np.float32(threshold))) if len(scores) else 0.0


def quantile_threshold(scores: Scores, drop: float) -> float:
    """The threshold whose share of stale inputs is nearest to ``drop``; of two equally near ones, the
    smaller.

    All thresholds between two neighbouring scores give the same result, so only the middle of each gap (and
    0, which drops nothing) is tried.
    """
    distinct, counts = np.unique(scores[np.isfinite(scores)], return_counts=True)
    if drop <= 0 or not len(distinct):
        return 0.0
    middles = (distinct + np.append(distinct[1:], distinct[-1])) / 2
    above = np.maximum(middles, np.nextafter(distinct, np.float32(np.inf)))
    candidates = np.concatenate((np.zeros(1, np.float32), above))
    shares = np.concatenate(([0], np.cumsum(counts))) / len(scores)
    return float(candidates[np.argmin(np.abs(shares - drop))])


def bisected_threshold(scores: Scores, drop: float) -> float:
    """The authors' search: at most 25 halvings of [0, 0.1]. If all fail, 0, which drops nothing."""
    low, high = 0.0, 0.1
    for _ in range(25):
        threshold = (low + high) / 2
        share = stale_share(scores, threshold)
        if drop - BAND <= share <= drop + BAND:
            return threshold
        if share < drop:
            low = threshold
        else:
            high = threshold
    return 0.0


SEARCHES = {"quantile": quantile_threshold, "bisection": bisected_threshold}
COLD, HOT, STALE = 0, 1, 2


@dataclass(frozen=True)
class Marks:
    """The hot rows, and which of them are stale, from batch ``first`` on."""

    first: int
    rows: RowIds
    """Hot rows, sorted, int64 [n]."""
    stale: NDArray[np.bool_]
    """Whether each of ``rows`` is stale, bool [n]."""
    total_rows: int
    codes: NDArray[np.uint8] = field(init=False, repr=False)
    """COLD, HOT or STALE for every row of all tables, uint8 [total_rows]."""

    def __post_init__(self) -> None:
        codes = np.zeros(self.total_rows, np.uint8)
        codes[self.rows] = np.where(self.stale, STALE, HOT)
        object.__setattr__(self, "codes", codes)

    @property
    def stale_rows(self) -> RowIds:
        """Global numbers of the stale rows, sorted."""
        return self.rows[self.stale]


def classify(
    marks: Marks, bags: Bags, stale_lookups: int | None
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which inputs are hot [B] and which are stale [B]. An input is hot if it has lookups and all of them
    find hot rows. It is stale if it is hot and at least ``stale_lookups`` of its lookups (None: all) find
    stale rows."""
    code, sample = marks.codes[bags.rows], samples_of(bags)
    lookups = np.bincount(sample, minlength=bags.batch_size)
    cold = np.bincount(sample[code == COLD], minlength=bags.batch_size)
    stale = np.bincount(sample[code == STALE], minlength=bags.batch_size)
    hot = (cold == 0) & (lookups > 0)
    return hot, hot & (stale >= (lookups if stale_lookups is None else stale_lookups))


SIZES = 32
"""A batch keeps a multiple of its 32nd part. Matrix kernels are made for each input size: when every batch
had a size of its own, a third fewer inputs made steps hardly shorter (README, Results)."""


def in_steps(stale: NDArray[np.bool_], step: int) -> NDArray[np.bool_]:
    """``stale`` [B] without its first inputs, as many as it takes for the other inputs to be a multiple of
    ``step``; none of them stays if that takes all."""
    found = np.flatnonzero(stale)
    chosen = np.zeros(len(stale), bool)
    chosen[found[(len(found) - len(stale)) % step :]] = True
    return chosen


def at_random(
    hot: NDArray[np.bool_], left_out: NDArray[np.bool_], seed: int, number: int
) -> NDArray[np.bool_]:
    """The control: as many hot inputs of batch ``number`` as ``left_out`` has, drawn at random, bool [B]."""
    drawn = np.random.default_rng((seed, number)).choice(
        np.flatnonzero(hot), int(left_out.sum()), replace=False
    )
    chosen = np.zeros(len(hot), bool)
    chosen[drawn] = True
    return chosen


@dataclass(frozen=True)
class Seen:
    """What the classifier did with one batch; kept until that batch has been trained."""

    number: int
    rows: RowIds
    """The global rows that the kept inputs look up, with repeats; empty if nobody wants to know."""
    samples: int
    hot: int = 0
    """How many inputs were classified as hot."""
    dropped: int = 0
    """How many inputs were left out."""
    seconds: float = 0.0


class InputClassifier:
    """Decides which inputs to keep. Batches are numbered from 0 in the order of training, over all epochs.

    It runs one batch ahead of training. A decision made after batch b was trained is used from batch b + 2
    on, so that the progress of the loader's thread does not matter. ``lookups`` returns a batch's rows,
    numbered over all tables. The number of inputs that a batch keeps is a multiple of ``step``, or all.
    ``random_seed``: leave out as many hot inputs, but drawn at random.
    """

    def __init__(
        self,
        stale_lookups: int | None,
        lookups: Callable[[Batch], Bags],
        step: int,
        random_seed: int | None = None,
    ) -> None:
        self.stale_lookups = stale_lookups
        self.lookups = lookups
        self.step = step
        self.random_seed = random_seed
        self.window: tuple[int, int] | None = None
        """The batches [first, end) between two snapshots, whose inputs are all trained."""
        self.stopped_at: int | None = None
        """From this batch on nothing is left out any more."""
        self.marks: tuple[Marks, ...] = ()
        """The marks in force and those for later, by ``first``."""
        self._seen: dict[int, Seen] = {}

    def in_force(self, number: int) -> Marks | None:
        """The marks for batch ``number``; None in a window, before the first marks and after the last."""
        if self.in_window(number) or (self.stopped_at is not None and number >= self.stopped_at):
            return None
        return next((marks for marks in reversed(self.marks) if marks.first <= number), None)

    def in_window(self, number: int) -> bool:
        """Whether batch ``number`` is between two snapshots."""
        return self.window is not None and self.window[0] <= number < self.window[1]

    def keep(self, batch: Batch, number: int) -> NDArray[np.bool_] | None:
        """Which inputs to keep, bool [B]: all that are not stale, and the stale ones that fill up a step.
        None if all are kept, which includes a batch with only stale inputs."""
        start, marks = perf_counter(), self.in_force(number)
        if marks is None and not self.in_window(number):
            self._seen[number] = Seen(number, np.empty(0, np.int64), batch_size(batch))
            return None
        bags = self.lookups(batch)
        if marks is None:
            self._seen[number] = Seen(number, bags.rows, bags.batch_size, seconds=perf_counter() - start)
            return None
        size = bags.batch_size
        hot, stale = classify(marks, bags, self.stale_lookups)
        left_out = in_steps(stale, self.step)
        if self.random_seed is not None:
            left_out = at_random(hot, left_out, self.random_seed, number)
        dropped = 0 if stale.all() else int(left_out.sum())
        if dropped:
            bags = bags.permuted(np.flatnonzero(~left_out))
        seconds = perf_counter() - start
        self._seen[number] = Seen(number, bags.rows, size, int(hot.sum()), dropped, seconds)
        return ~left_out if dropped else None

    def trained(self, number: int) -> Seen:
        """What was done with batch ``number``, which has now been trained."""
        return self._seen.pop(number)
