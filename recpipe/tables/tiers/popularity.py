"""Selects popular rows by access counts; equal counts give the same result, also for ties."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recpipe.common.compiled import compiled
from recpipe.common.spread import ALONE, Spread
from recpipe.plugin.policy import RowIds

CAP = 1 << 16
"""Counts from this one on are put in order; of lower ones it is enough to know how many are equal."""
Counts = NDArray[np.int32]


def top_rows(counts: Counts, size: int, resident: RowIds | None = None, spread: Spread = ALONE) -> RowIds:
    """The ``size`` rows with the highest counts above 0, as global row numbers, int64, sorted.

    Of rows with equal counts, those that are already ``resident`` come first (moving a row for nothing costs
    two transfers), then lower row numbers. ``spread``: threads that share the work.
    """
    if size == 0:
        return np.empty(0, np.int64)
    parts = spread.parts(len(counts))
    least, tied = _least(counts, size, spread.map(lambda part: _numbers(counts[part]), parts))
    marks = np.zeros(len(counts), bool)
    marked = 0
    if resident is not None:
        marked = _mark(marks, counts, least, resident[resident >= 0])
    found = spread.map(lambda part: _tally(counts[part], least, marks[part]), parts)
    others, works = max(0, tied - marked), []
    for part, (above, without, with_mark) in zip(parts, found, strict=True):
        mine = min(others, without), min(tied - others, with_mark)
        works.append((part, mine, above + sum(mine)))
        others, tied = others - mine[0], tied - sum(mine)

    def chosen(part: slice, mine: tuple[int, int], most: int) -> RowIds:
        return _chosen(counts[part], part.start, least, mine[0], mine[1], marks[part], most)

    return np.concatenate(spread.map(chosen, *zip(*works, strict=True)))


def _least(counts: Counts, size: int, of_parts: list[NDArray[np.int64]]) -> tuple[int, int]:
    """The least of the ``size`` highest ``counts`` above 0, and how many of these are equal to it.
    ``of_parts``: what ``_numbers`` says of each part of them."""
    numbers = np.sum(of_parts, axis=0)
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
def _tally(counts: Counts, least: int, marks: NDArray[np.bool_]) -> tuple[int, int, int]:
    """How many rows have more than ``least`` lookups; how many have as many and no mark, and how many a
    mark."""
    above = unmarked = marked = 0
    for row in range(len(counts)):
        tied = counts[row] == least
        above += counts[row] > least
        marked += tied & marks[row]
        unmarked += tied & (not marks[row])
    return above, unmarked, marked


@compiled
def _chosen(
    counts: Counts, first: int, least: int, others: int, marked: int, marks: NDArray[np.bool_], most: int
) -> RowIds:
    """The ``most`` rows, from row ``first`` on, with more than ``least`` lookups and the first of those with
    as many, ``marked`` of those that have a mark and ``others``."""
    rows = np.empty(most, np.int64)
    left = np.array((others, marked))
    count = 0
    for row in range(len(counts)):
        if counts[row] < least:
            continue
        if counts[row] == least:
            left[int(marks[row])] -= 1
            if left[int(marks[row])] < 0:
                continue
        rows[count] = first + row
        count += 1
    return rows
