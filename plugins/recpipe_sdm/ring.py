"""``Ring``: places for rows that were read because a request asked for them, the oldest of which are given
away first."""

from __future__ import annotations

import numpy as np

from recpipe.plugin import RowIds
from recpipe_sdm.index import RowIndex

MARGIN = 4
"""Places for each row that one batch looks up here: rows are read ahead while others are looked up."""


class Ring:
    """Hands out places ``first``, ``first + 1``, ... of at most ``most``, as few as do.

    It is a room for what was read a moment ago: each place is used again once all others have been. What was
    read for a request that is never scored goes like everything else.
    """

    def __init__(self, first: int, most: int) -> None:
        self.first, self.most = first, most
        self.size = 0
        """Places that are in use, or were."""
        self._rows: RowIds = np.empty(0, np.int64)
        self._next = 0

    def take(self, rows: RowIds, index: RowIndex) -> int:
        """The first of the places for ``rows`` (distinct), one after the other; ``index`` no longer names
        those that are in them. The caller names ``rows`` once they are there."""
        count = len(rows)
        if self._next + count > self.size:
            self._next = 0
        start = self._next
        old = self._rows[start : start + count]  # 0 where there was none yet: row 0 is not there, then
        here = np.arange(self.first + start, self.first + start + count)
        index.forget(old[index.held(old) == here])
        self._rows[start : start + count] = rows
        self._next = start + count
        return self.first + start

    def grow(self, rows: int) -> None:
        """Have places for a batch that looks up so many rows here, at least two for each: then reading those
        that it lacks, again and again, ends, since what is read last stays."""
        assert 2 * rows <= self.most, (rows, self.most)
        size = min(MARGIN * rows, self.most)
        if size > self.size:
            self._rows = np.concatenate((self._rows, np.zeros(size - self.size, np.int64)))
            self.size = size

    @property
    def nbytes(self) -> int:
        """Memory beside the places themselves."""
        return self._rows.nbytes
