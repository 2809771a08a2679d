"""Rows that wait in host memory to be written to a cold store."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recpipe.plugin import Records

PIECES = 8
"""How many pieces of the room are written one after the other, each before reads that came meanwhile."""
Rows = NDArray[np.int64]
Found = NDArray[np.bool_]


def positions(rows: NDArray[np.integer], wanted: NDArray[np.integer]) -> tuple[NDArray[np.int64], Found]:
    """For each of ``wanted``, its position in sorted ``rows`` (any, if it is not there) and whether it is
    there."""
    if not len(rows):
        return np.zeros(len(wanted), np.int64), np.zeros(len(wanted), bool)
    at = np.minimum(np.searchsorted(rows, wanted), len(rows) - 1)
    return at, rows[at] == wanted


class Writes:
    """Rows that wait to be written, each with its newest record; at most ``capacity``."""

    def __init__(self, capacity: int, width: int, full: float) -> None:
        self.least = full * capacity
        """From more rows than these on, some are written."""
        self.rows: Rows = np.empty(0, np.int64)
        """Sorted."""
        self.records = np.empty((capacity, width), np.float32)
        self._places = np.empty(0, np.int32)
        """The place of each of ``rows`` in ``records``."""
        self._free = np.arange(capacity, dtype=np.int32)
        self._changed = np.zeros(capacity, bool)
        """Of each place, whether its record is newer than what ``piece`` gave away."""

    def find(self, wanted: Rows) -> tuple[NDArray[np.int32], Found]:
        """Places in ``records`` of those of ``wanted`` that wait, and which these are."""
        at, here = positions(self.rows, wanted)
        return self._places[at[here]], here

    def put(self, rows: Rows, records: Records) -> bool:
        """Add distinct ``rows``, or replace their records; False if there is no room, and nothing is done."""
        places, here = self.find(rows)
        new = np.flatnonzero(~here)
        if len(new) > len(self._free):
            return False
        self.records[places] = records[here]
        self._changed[places] = True
        new = new[np.argsort(rows[new])]
        fresh, self._free = self._free[: len(new)], self._free[len(new) :]
        self.records[fresh] = records[new]
        self._changed[fresh] = True
        at = np.searchsorted(self.rows, rows[new])
        self.rows = np.insert(self.rows, at, rows[new])
        self._places = np.insert(self._places, at, fresh)
        return True

    def piece(self, first: int) -> Rows:
        """The next rows to write, from number ``first`` on, or else from the start."""
        start = int(np.searchsorted(self.rows, first)) % max(1, len(self.rows))
        return self.rows[start : start + max(1, len(self.records) // PIECES)]

    def between(self, first: int, last: int) -> Rows:
        """Those of numbers ``first`` to ``last``."""
        return self.rows[np.searchsorted(self.rows, first) : np.searchsorted(self.rows, last, "right")]

    def give(self, rows: Rows) -> Records:
        """The records of waiting ``rows``, to be written; ``written`` follows."""
        places, _ = self.find(rows)
        self._changed[places] = False
        return self.records[places]

    def written(self, rows: Rows) -> None:
        """Drop ``rows`` that were given and have been written, but for those that changed meanwhile."""
        at, _ = positions(self.rows, rows)
        at = at[~self._changed[self._places[at]]]
        self._free = np.concatenate((self._free, self._places[at]))
        self.rows, self._places = np.delete(self.rows, at), np.delete(self._places, at)

    @property
    def full(self) -> bool:
        """Whether it is time to write some."""
        return len(self.rows) > self.least

    @property
    def nbytes(self) -> int:
        """Its memory."""
        parts = (self.records, self.rows, self._places, self._free, self._changed)
        return sum(part.nbytes for part in parts)
