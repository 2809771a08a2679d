"""Slipstream's snapshot block: measures how far each hot row moved during a window of batches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recpipe.plugin import RowIds


@dataclass(frozen=True)
class Changes:
    """The rows that were hot at both ends of a window, and how far they moved."""

    rows: RowIds
    """Global row numbers, sorted, int64 [n]."""
    delta: NDArray[np.float32]
    """max_d |S1 - S0| of each row, float32 [n]; infinite for a row that was looked up too few times to
    tell."""

    def stale(self, threshold: float) -> NDArray[np.bool_]:
        """Which of ``rows`` are stale: every dimension moved by less than ``threshold``."""
        return self.delta < np.float32(threshold)

    def of(self, rows: RowIds) -> NDArray[np.float32]:
        """The change of each of ``rows`` (in any order, with repeats); NaN for a row that is not hot."""
        if not len(self.rows):
            return np.full(len(rows), np.nan, np.float32)
        place = np.minimum(np.searchsorted(self.rows, rows), len(self.rows) - 1)
        return np.where(self.rows[place] == rows, self.delta[place], np.float32(np.nan))


def changes(
    before: RowIds, moved: tuple[RowIds, NDArray[np.float32]], touches: NDArray[np.int64], min_touches: int
) -> Changes:
    """The changes of rows that were resident ``before`` the window and after it, from how far they have
    ``moved``. ``touches`` has the window's number of lookups of each of ``before`` (sorted).

    A row with fewer than ``min_touches`` lookups had no chance to move, so it never counts as stale. With 0,
    a row without lookups counts as stale, as in the authors' code.
    """
    rows, delta = moved
    delta = delta.copy()
    delta[touches[np.searchsorted(before, rows)] < min_touches] = np.inf
    return Changes(rows, delta)


def count_touches(touches: NDArray[np.int64], rows: RowIds, looked_up: RowIds) -> None:
    """Add a batch's lookups of ``rows`` (sorted) to ``touches``, in place."""
    if len(rows):
        place = np.minimum(np.searchsorted(rows, looked_up), len(rows) - 1)
        touches += np.bincount(place[rows[place] == looked_up], minlength=len(rows))
