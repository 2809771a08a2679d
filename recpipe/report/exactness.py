"""Whether rows that declare themselves exact are: how far they are off, beside what one rounding does."""

from __future__ import annotations

from dataclasses import dataclass

FACTOR = 10.0
"""How many times what one rounding does an exact row may differ.

Rows that add float sums in another order came to 0.4 to 1.2 times its root mean square (default recipe, 5 to
391 steps) and up to twice its largest difference. That one jumps: under Adagrad a gradient next to zero that
changes sign moves a weight by two learning rates, in one run some steps before the other.
"""
FLOOR = 2.0**-23
"""Least difference that is allowed for: float32's spacing at 1."""


@dataclass(frozen=True)
class Difference:
    """How far the parameters of two runs are apart: tables, optimizer state and dense part together."""

    largest: float
    """Largest absolute difference of any."""
    rms: float
    """Root of the mean square of all differences: what shifts many parameters shows here first."""

    def within(self, rounding: Difference | None) -> bool | None:
        """Whether an exact row may differ so from the base row.

        ``rounding`` is the difference that one rounding of every first weight makes to the base row;
        without it, equal parameters alone are judged and the rest is None.
        """
        if self.largest == 0:
            return True
        if rounding is None:
            return None
        return self.largest <= limit(rounding.largest) and self.rms <= limit(rounding.rms)


def limit(rounding: float) -> float:
    """What an exact row may differ by where one rounding makes a difference of ``rounding``."""
    return max(FACTOR * rounding, FLOOR)
