"""Judges rows that declare to be exact, by comparing their difference with the effect of one rounding."""

from __future__ import annotations

from dataclasses import dataclass

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
    """The difference between the parameters of two runs: tables, optimizer state and dense part together."""

    largest: float
    """The largest absolute difference."""
    rms: float
    """The root mean square of all differences, where small shifts of many parameters show first."""

    def within(self, rounding: Difference | None) -> bool | None:
        """Whether an exact row may differ this much from the base row.

        ``rounding`` is the difference that one rounding of every first weight makes to the base row. Without
        it, only equal parameters can be judged; otherwise the result is None.
        """
        if self.largest == 0:
            return True
        if rounding is None:
            return None
        return self.largest <= limit(rounding.largest) and self.rms <= limit(rounding.rms)


def limit(rounding: float) -> float:
    """The difference that an exact row may have if one rounding makes a difference of ``rounding``."""
    return max(FACTOR * rounding, FLOOR)
