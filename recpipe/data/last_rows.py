"""The last rows of each user, found in one pass, of which no more are in memory than are asked for."""

from __future__ import annotations

import numpy as np

from recpipe.data.columns import Int64
from recpipe.data.gathered import Gathered

STEP = 1 << 16
"""Rows that wait, at least, until all but the last ones of each user are dropped."""


class LastRows:
    """The last ``most`` rows of each user: by time, and by their places where times are alike."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._rows = Gathered(3, self._last, STEP)
        """Users' keys, times and places, in this order."""

    def add(self, keys: Int64, times: Int64, places: Int64) -> None:
        """Further rows, int64 [n] each."""
        self._rows.add(keys, times, places)

    def _last(self, rows: Int64) -> Int64:
        rows = rows[:, np.lexsort(rows[::-1])]
        return rows[:, _from_end(rows[0]) < self._most]

    def places(self, valid: int, test: int) -> tuple[Int64, Int64]:
        """The places, in ascending order, of the last ``test`` rows of each user, and of the ``valid`` ones
        before them, given first; never of a user's first row, if ``most`` is more than both."""
        keys, _, places = self._rows.merged()
        place = _from_end(keys)
        # The first one that is kept is the user's first, or has too many after it.
        later = np.concatenate((np.zeros(1, bool), keys[1:] == keys[:-1]))[: len(keys)]
        tests = later & (place < test)
        valids = later & (place < valid + test) & ~tests
        return np.sort(places[valids]), np.sort(places[tests])


def _from_end(keys: Int64) -> Int64:
    """How many equal ones follow each of ``keys``, which are in order."""
    ends = np.searchsorted(keys, keys, "right")
    return np.asarray(ends - 1 - np.arange(len(keys)), np.int64)
