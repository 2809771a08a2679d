"""Slipstream's sampling block: the threshold under which the wanted share of hot inputs is stale."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recpipe.kit import Bags
from recpipe_slipstream.snapshot import Changes

Scores = NDArray[np.float32]
BAND = 0.08
"""The authors' search accepts a sampled share within this of the wanted one."""


def samples_of(bags: Bags) -> NDArray[np.int64]:
    """The sample that each lookup belongs to, int64 [L]."""
    features = (len(bags.offsets) - 1) // bags.batch_size if bags.batch_size else 0
    return np.repeat(np.tile(np.arange(bags.batch_size), features), np.diff(bags.offsets))


def input_scores(changes: Changes, bags: Bags, stale_lookups: int | None) -> Scores:
    """For each hot input of a batch the least threshold above which it is stale, float32 [hot inputs].

    That is the alpha-th smallest change among its rows, alpha = ``stale_lookups`` (None: all of its
    lookups, so the largest change). Infinite where no threshold makes it stale. An input is hot when it
    looks up hot rows only, one at least.
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
    """Share of sampled hot inputs that ``threshold`` makes stale; never falls as it grows. 0 without any."""
    return float(np.mean(scores < np.float32(threshold))) if len(scores) else 0.0


def quantile_threshold(scores: Scores, drop: float) -> float:
    """The threshold whose share of stale inputs is nearest to ``drop``; the smaller one of two as near.

    Between two neighbouring scores every threshold decides alike, so the middle of each gap (and 0, which
    drops nothing) are all that need be tried.
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
    """The authors' search: at most 25 halvings of [0, 0.1]; 0, which drops nothing, where all fail."""
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
