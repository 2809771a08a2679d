"""Selects popular rows by access counts; equal counts give the same result, also for ties."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recpipe.common.compiled import compiled
from recpipe.plugin.policy import RowIds

CAP = 1 << 16
"""Counts from this one on are put in order; of lower ones it is enough to know how many are equal."""
Counts = NDArray[np.int32]


def top_rows(counts: Counts, size: int, resident: RowIds | None = None) -> RowIds:
    """The ``size`` rows with the highest counts above 0, as global row numbers, int64, sorted.

    Of rows with equal counts, those that are already ``resident`` come first (moving a row for nothing costs
    two transfers), then lower row numbers.
    """
    if size == 0:
        return np.empty(0, np.int64)
    least, tied = _least(counts, size)
    marks = np.zeros(len(counts), bool)
    marked = 0
    if resident is not None:
        marked = _mark(marks, counts, least, resident[resident >= 0])
    return _chosen(counts, least, min(tied, marked), max(0, tied - marked), marks, size)


def _least(counts: Counts, size: int) -> tuple[int, int]:
    """The least of the ``size`` highest ``counts`` above 0, and how many of these are equal to it."""
    numbers = _numbers(counts)
    at_least = np.append(np.cumsum(numbers[:0:-1])[::-1], 0)  # from 1 on
    if at_least[0] <= size:
        return 1, int(numbers[1])
    least = int(np.flatnonzero(at_least >= size)[-1]) + 1
    if least < CAP:
        return least, size - int(at_least[least])
    high = np.sort(counts[counts >= CAP])
    least = int(high[len(high) - size])
    return least, size - int(np.count_nonzero(high > least))


@compiled
def _numbers(counts: Counts) -> NDArray[np.int64]:
    """How many rows have each count above 0 and below ``CAP``, and how many a higher one."""
    numbers = np.zeros(CAP + 1, np.int64)
    for count in counts:
        if count:  # most are 0, and adding to one number again and again waits for itself
            numbers[min(count, CAP)] += 1
    return numbers


@compiled
def _mark(marks: NDArray[np.bool_], counts: Counts, least: int, resident: RowIds) -> int:
    """Mark those ``resident`` rows whose count is ``least``; returns their number."""
    marked = 0
    for row in resident:
        if counts[row] == least:
            marks[row] = True
            marked += 1
    return marked


@compiled
def _chosen(
    counts: Counts, least: int, marked: int, others: int, marks: NDArray[np.bool_], size: int
) -> RowIds:
    """The rows with more than ``least`` lookups and the first of those with as many, ``marked`` of those that
    have a mark and ``others``; at most ``size`` in all."""
    rows = np.empty(size, np.int64)
    left = np.array((others, marked))
    count = 0
    for row in range(len(counts)):
        if counts[row] < least:
            continue
        if counts[row] == least:
            left[int(marks[row])] -= 1
            if left[int(marks[row])] < 0:
                continue
        rows[count] = row
        count += 1
    return rows[:count].copy()
