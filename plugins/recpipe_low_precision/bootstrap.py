"""Paired bootstrap (Efron 1979) of the difference between two models' losses on the same samples."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recpipe.answers.figures import Interval

RESAMPLES = 1000
GROUPS = 8192
"""Most groups of neighbouring samples that are drawn; up to so many samples, each is a group of its own."""
TAIL = 2.5
"""Percent of resamples beyond each end of an interval."""
Floats = NDArray[np.float64]


class PairedBootstrap:
    """Resamples of ``samples`` samples, the same for every question, so that equal losses give equal
    intervals."""

    def __init__(self, samples: int, seed: int = 0) -> None:
        self.samples = samples
        self.groups = min(samples, GROUPS)
        self.starts = np.arange(self.groups) * samples // self.groups
        draw = np.random.default_rng(seed)
        self.times = np.empty((RESAMPLES, self.groups), np.float32)
        """How often each resample has each group."""
        for times in self.times:
            times[:] = np.bincount(draw.integers(self.groups, size=self.groups), minlength=self.groups)

    def relative(self, losses: Floats, base: Floats) -> Interval:
        """The mean of ``losses`` over that of ``base``, float64 [samples] each, less 1.

        For logloss that is the relative difference of normalized entropy too: the entropy of the labels, by
        which both are divided, is the same in each resample.
        """
        apart, whole = self._sums(losses - base), self._sums(base)
        # The differences are small against float32's rounding only if they are summed by themselves.
        drawn = self._drawn(apart) / self._drawn(whole)
        low, high = np.percentile(drawn, (TAIL, 100 - TAIL))
        return Interval(float(apart.sum() / whole.sum()), float(low), float(high))

    def auc(self, labels: NDArray[np.float32], scores: Floats, base: Floats) -> Interval:
        """AUC of ``scores`` less that of ``base``, for 0/1 ``labels`` [samples]."""
        group = np.zeros(self.samples, np.int64)
        group[self.starts[1:]] = 1
        group = np.cumsum(group)
        ranked, ranked_base = _Ranked(labels, scores, group), _Ranked(labels, base, group)
        drawn = [ranked.auc(times) - ranked_base.auc(times) for times in self.times]
        low, high = np.percentile(drawn, (TAIL, 100 - TAIL))
        once = np.ones(self.groups, np.float32)
        return Interval(ranked.auc(once) - ranked_base.auc(once), float(low), float(high))

    def _sums(self, values: Floats) -> Floats:
        found: Floats = np.add.reduceat(values, self.starts)
        return found

    def _drawn(self, sums: Floats) -> Floats:
        scale = float(np.abs(sums).max()) or 1.0
        return (self.times @ (sums / scale).astype(np.float32)).astype(np.float64) * scale


class _Ranked:
    """Samples in the order of their scores, for AUCs of resamples."""

    def __init__(self, labels: NDArray[np.float32], scores: Floats, group: NDArray[np.int64]) -> None:
        order = np.argsort(scores, kind="stable")
        ordered = scores[order]
        self.ties = np.concatenate(([0], np.flatnonzero(np.diff(ordered)) + 1))
        self.positive = labels[order] > 0.5
        self.group = group[order]

    def auc(self, times: NDArray[np.float32]) -> float:
        """With each sample as often as ``times`` says of its group."""
        weight = times[self.group].astype(np.float64)
        positive = np.add.reduceat(np.where(self.positive, weight, 0), self.ties)
        negative = np.add.reduceat(np.where(self.positive, 0, weight), self.ties)
        below = np.cumsum(negative) - negative
        pairs = positive.sum() * negative.sum()
        return float((positive * (below + negative / 2)).sum() / pairs) if pairs else float("nan")
