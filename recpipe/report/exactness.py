"""Judges rows that declare to be exact, by comparing their difference with the effect of one rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FACTOR = 4.0
"""How many times the effect of one rounding an exact row may differ.

Measured with the default recipe after 5 to 391 steps, and with bags of several ids: rows that add float sums
in another order reach 0.3 to 1.2 times its root mean square and 0.04 to 1.1 times its largest difference. A
learning rate that is off by 0.1% reaches 6 times its root mean square after 391 steps, and 20,000 times after
78.
"""
FLOOR = 2.0**-23
"""The least difference that is always allowed: float32's spacing at 1."""


@dataclass(frozen=True)
class Difference:
    """The difference between two runs' float32 numbers: their parameters, or their held-out predictions."""

    largest: float = 0.0
    """The largest absolute difference."""
    rms: float = 0.0
    """The root mean square of all differences, where small shifts of many numbers show first."""
    size: float = 1.0
    """The largest absolute value, if that is over 1: differences are rounded in proportion to it."""

    def within(self, rounding: Difference) -> bool:
        """Whether an exact row may differ this much, if one rounding of every first weight makes the
        difference ``rounding``."""
        allowed = rounding.allowed()
        return self.largest <= allowed.largest and self.rms <= allowed.rms

    def allowed(self) -> Difference:
        """What an exact row may differ by, if this is what one rounding does."""
        floor = FLOOR * self.size
        return Difference(max(FACTOR * self.largest, floor), max(FACTOR * self.rms, floor), self.size)


@dataclass(frozen=True)
class Apart:
    """How far an exact row's run is from the base row's run of the same round."""

    parameters: Difference
    """Of tables, optimizer state and dense part together."""
    predictions: Difference | None = None
    """Of the evaluation whose predictions differ most; None if the model has none to score."""
    loss: Difference = Difference()
    """Of the evaluations' losses, which are the model's own and may depend on more than the predictions;
    ``size``: 1 and the loss."""

    @property
    def equal(self) -> bool:
        """Whether nothing differs at all."""
        predictions = self.predictions or Difference()
        return self.parameters.largest == predictions.largest == self.loss.largest == 0

    def faults(self, rounding: Apart | None) -> list[str] | None:
        """What differs more than one rounding explains: ``parameters``, ``predictions``, ``loss``.

        ``rounding`` is what one rounding of every first weight does to the base row. Without it only a run
        that equals the base row's can be judged; otherwise the result is None.
        """
        if self.equal:
            return []
        if rounding is None:
            return None
        found = [] if self.parameters.within(rounding.parameters) else ["parameters"]
        if self.predictions is not None and not self.predictions.within(rounding.predictions or Difference()):
            found.append("predictions")
        return found if self.loss.largest <= rounding.allowed_loss else [*found, "loss"]

    @property
    def allowed_loss(self) -> float:
        """The fair difference of a loss, if this is what one rounding does.

        Fair predictions move a loss, too: by at most their root mean square where it is that of clicks, and
        by at most that times twice the root of the loss where it is a squared error.
        """
        moved = self.parameters if self.predictions is None else self.predictions
        return max(FACTOR * self.loss.largest, moved.allowed().rms * self.loss.size)


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
