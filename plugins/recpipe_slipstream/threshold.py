"""Slipstream's sampling block: finds the threshold with which the wanted share of hot inputs is stale."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recpipe.plugin import Bags
from recpipe_slipstream.snapshot import Changes

Scores = NDArray[np.float32]
BAND = 0.08
"""The authors' search accepts a sampled share that differs from the wanted one by at most this."""


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
