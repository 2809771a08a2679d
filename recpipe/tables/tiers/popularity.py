"""Selects popular rows by access counts; equal counts give the same result, also for ties."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recpipe.plugin.policy import RowIds

CAP = 1 << 16
"""Counts from this one on are put in order."""


def top_rows(counts: NDArray[np.int32], size: int, resident: RowIds | None = None) -> RowIds:
    """The ``size`` rows with the highest counts above 0, as global row numbers, int64, sorted.

    Of rows with equal counts, those that are already ``resident`` come first (moving a row for nothing costs
    two transfers), then lower row numbers.
    """
    counted = np.flatnonzero(counts)
    if len(counted) <= size:
        return counted
    if size == 0:
        return counted[:0]
    values = counts[counted]
    least = _least_of(values, size)
    certain, tied = counted[values > least], counted[values == least]
    # Marks of all rows take less time than sorting those that matter.
    marks = np.zeros(len(counts), bool)
    if resident is not None:
        marks[resident[resident >= 0]] = True
        here = marks[tied]
        tied = np.concatenate((tied[here], tied[~here]))
        marks[:] = False
    marks[certain] = True
    marks[tied[: size - len(certain)]] = True
    return np.flatnonzero(marks)


def _least_of(counts: NDArray[np.int32], size: int) -> int:
    """The least of the ``size`` highest ``counts``, which are above 0. Most of them are small and equal, so
    that numbering them is faster than putting them in order."""
    capped = np.bincount(np.minimum(counts, CAP))
    at_least = np.cumsum(capped[::-1])[::-1]
    least = int(np.flatnonzero(at_least >= size)[-1])
    return least if least < CAP else int(np.partition(counts, len(counts) - size)[len(counts) - size])
