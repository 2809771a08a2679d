"""Slipstream's snapshot block, which measures how far each hot row moved during a window of batches, and its
sampling block, which finds the threshold with which the wanted share of hot inputs is stale."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recpipe.plugin import Bags, RowIds

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
