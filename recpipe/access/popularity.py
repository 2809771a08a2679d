"""Selects popular rows by access counts; equal counts give the same result, also for ties."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from recpipe.common.loops import ALONE, Spread, compiled
from recpipe.plugin.bags import RowIds

CAP = 1 << 16
"""Counts from this one on are put in order; of lower ones it is enough to know how many are equal."""
Counts = NDArray[np.int32]


def top_rows(counts: Counts, size: int, resident: RowIds | None = None, spread: Spread = ALONE) -> RowIds:
    """The ``size`` rows with the highest counts above 0, as global row numbers, int64, sorted.

    Of rows with equal counts, those that are already ``resident`` (distinct rows; below 0: none) come first
    (moving a row for nothing costs two transfers), then lower row numbers. ``spread``: threads that share the
    work.
    """
    if size == 0:
        return np.empty(0, np.int64)
    parts = spread.parts(len(counts))
    counted = spread.map(lambda part: _counted(counts[part], part.start), parts)
    rows, own_counts, numbers = zip(*counted, strict=True)
    if sum(map(len, rows)) <= size:
        return np.concatenate(rows)
    least, tied = _least(np.sum(numbers, axis=0), size, own_counts)
    marks = np.zeros(len(counts), bool)
    if resident is not None:
        mine = [resident[part] for part in spread.parts(len(resident))]
        spread.map(lambda some: _mark(marks, counts, least, some), mine)
    found = spread.map(lambda of, own: _tally(of, own, least, marks), rows, own_counts)
    others, works = max(0, tied - sum(marked for _, _, marked in found)), []
    for above, without, with_mark in found:
        taken = min(others, without), min(tied - others, with_mark)
        works.append((*taken, above + sum(taken)))
        others, tied = others - taken[0], tied - sum(taken)
    chosen = spread.map(lambda of, own, work: _chosen(of, own, least, marks, *work), rows, own_counts, works)
    return np.concatenate(chosen)


@compiled
def _counted(counts: Counts, first: int) -> tuple[RowIds, Counts, NDArray[np.int64]]:
    """The rows, from row ``first`` on, with ``counts`` above 0, and their counts; how many have each count
    below ``CAP``, and how many a higher one. Most rows of large tables have none, so that what follows is
    short."""
    rows, own = np.empty(len(counts), np.int64), np.empty(len(counts), np.int32)
    numbers = np.zeros(CAP + 1, np.int64)
    found = 0
    for row in range(len(counts)):
        if counts[row]:
            rows[found], own[found] = first + row, counts[row]
            numbers[min(counts[row], CAP)] += 1
            found += 1
    return rows[:found].copy(), own[:found].copy(), numbers


def _least(numbers: NDArray[np.int64], size: int, counts: Sequence[Counts]) -> tuple[int, int]:
    """The least of the ``size`` highest of more ``counts``, and how many of these are equal to it.
    ``numbers``: how many are equal to each below ``CAP``, and how many are higher."""
    at_least = np.append(np.cumsum(numbers[:0:-1])[::-1], 0)  # from 1 on
    least = int(np.flatnonzero(at_least >= size)[-1]) + 1
    if least < CAP:
        return least, size - int(at_least[least])
    high = np.sort(np.concatenate([part[part >= CAP] for part in counts]))
    least = int(high[len(high) - size])
    return least, size - int(np.count_nonzero(high > least))


@compiled
def _mark(marks: NDArray[np.bool_], counts: Counts, least: int, resident: RowIds) -> None:
    """Mark those ``resident`` rows whose count is ``least``."""
    for row in resident:
        if row >= 0 and counts[row] == least:
            marks[row] = True


@compiled
def _tally(rows: RowIds, counts: Counts, least: int, marks: NDArray[np.bool_]) -> tuple[int, int, int]:
    """How many ``rows`` have ``counts`` above ``least``; how many have as many and no mark, and how many a
    mark."""
    above = unmarked = marked = 0
    for i in range(len(rows)):
        tied = counts[i] == least
        above += counts[i] > least
        marked += tied & marks[rows[i]]
        unmarked += tied & (not marks[rows[i]])
    return above, unmarked, marked


@compiled
def _chosen(
    rows: RowIds, counts: Counts, least: int, marks: NDArray[np.bool_], others: int, marked: int, most: int
) -> RowIds:
    """The ``most`` of ``rows`` with ``counts`` above ``least`` and the first of those with as many,
    ``marked`` of those that have a mark and ``others``."""
    found = np.empty(most, np.int64)
    left = np.array((others, marked))
    count = 0
    for i in range(len(rows)):
        if counts[i] < least:
            continue
        if counts[i] == least:
            mark = int(marks[rows[i]])
            left[mark] -= 1
            if left[mark] < 0:
                continue
        found[count] = rows[i]
        count += 1
    return found
