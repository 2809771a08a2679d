"""Statistics of ids whose rows are looked up by Zipf's law: row i in proportion to i^-skew, for any number of
rows up to 10^12 and more. ``skew`` 0 is uniform."""

from __future__ import annotations

from functools import lru_cache
from math import log, pow

import numpy as np

EXACT = 1024
"""Rows that are summed one by one; those after them in steps of their logarithm."""
STEPS = 600


def weight(rows: float, skew: float) -> float:
    """The sum of i^-skew for i up to ``rows``."""
    few = np.arange(1, min(rows, EXACT) + 1, dtype=np.float64)
    return float((few**-skew).sum()) + _integral(EXACT, rows, skew)


def _integral(after: float, until: float, skew: float) -> float:
    """The sum from ``after`` + 1 to ``until``, by Euler's and Maclaurin's formula."""
    if until <= after:
        return 0.0
    ends = 0.5 * (pow(until, -skew) - pow(after, -skew))
    if abs(skew - 1) < 1e-9:
        return log(until / after) + ends
    return (pow(until, 1 - skew) - pow(after, 1 - skew)) / (1 - skew) + ends


def covered(rows: float, skew: float, share: float) -> float:
    """The share of lookups that the most popular ``share`` of the rows get."""
    if share >= 1:
        return 1.0
    kept = share * rows
    return (weight(kept, skew) if kept >= 1 else kept) / weight(rows, skew)


@lru_cache(maxsize=65536)
def distinct(rows: float, skew: float, lookups: float) -> float:
    """How many different rows ``lookups`` lookups have, expected."""
    if lookups <= 1 or rows <= 1:
        return min(rows, lookups)
    whole = weight(rows, skew)
    few = np.arange(1, min(rows, EXACT) + 1, dtype=np.float64)
    found = float(-np.expm1(-lookups * few**-skew / whole).sum())
    if rows > EXACT:
        edges = np.geomspace(EXACT, rows, STEPS + 1)
        middle = np.sqrt(edges[1:] * edges[:-1])
        found += float((np.diff(edges) * -np.expm1(-lookups * middle**-skew / whole)).sum())
    return min(found, rows, lookups)
