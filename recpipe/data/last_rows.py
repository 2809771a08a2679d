"""The last rows of each user, found in one pass, of which no more are in memory than are asked for."""

from __future__ import annotations

import numpy as np

from recpipe.data.columns import Int64

STEP = 1 << 16
"""Rows that wait, at least, until all but the last ones of each user are dropped."""


class LastRows:
    """The last ``most`` rows of each user: by time, and by their places where times are alike."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept = np.empty((3, 0), np.int64)
        """Users' keys, times and places [3, n], in this order."""
        self._waiting: list[Int64] = []

    def add(self, keys: Int64, times: Int64, places: Int64) -> None:
        """Further rows, int64 [n] each."""
        self._waiting.append(np.stack([keys, times, places]))
        if sum(each.shape[1] for each in self._waiting) > max(STEP, self._kept.shape[1]):
            self._merge()

    def _merge(self) -> None:
        rows = np.concatenate([self._kept, *self._waiting], 1)
        rows = rows[:, np.lexsort(rows[::-1])]
        self._kept, self._waiting = rows[:, _from_end(rows[0]) < self._most], []

    def places(self, valid: int, test: int) -> tuple[Int64, Int64]:
        """The places, in ascending order, of the last ``test`` rows of each user, and of the ``valid`` ones
        before them, given first; never of a user's first row, if ``most`` is more than both."""
        self._merge()
        keys, _, places = self._kept
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
