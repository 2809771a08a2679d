"""95% intervals: of a ratio over rounds, by bootstrap; of a figure of quality over seeds, by Student's t."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

LEVEL = 0.95
RESAMPLES = 4000
LEAST = 3
"""The least number of rounds or seeds for an interval."""
Interval = tuple[float, float]
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)
"""Student's t at 97.5% for 1 to 14 degrees of freedom."""
_NORMAL = 1.96


def median_interval(values: Sequence[float]) -> Interval | None:
    """Percentile bootstrap (Efron 1979) of the median; None for fewer than ``LEAST`` values.

    The resamples are always the same, so that equal values have equal intervals.
    """
    if len(values) < LEAST:
        return None
    drawn = np.random.default_rng(0).choice(np.asarray(values, np.float64), (RESAMPLES, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), (50 * (1 - LEVEL), 50 * (1 + LEVEL)))
    return float(low), float(high)


def mean_interval(values: Sequence[float]) -> Interval | None:
    """The interval of the mean of independent ``values``; None for fewer than ``LEAST``."""
    if len(values) < LEAST:
        return None
    degrees = len(values) - 1
    t = _T[degrees - 1] if degrees <= len(_T) else _NORMAL + 2.5 / degrees
    half = t * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    mean = float(np.mean(values))
    return mean - half, mean + half


def width(interval: Interval | None, around: float | None) -> float:
    """The interval's width as a share of ``around``; infinite without an interval."""
    return (interval[1] - interval[0]) / around if interval and around else math.inf
