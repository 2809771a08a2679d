"""What is found in blocks, one after another, and merged often enough that memory does not grow with them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from recpipe.data.columns import Int64


class Gathered:
    """Columns int64 [k, n] that ``merge`` makes fewer, again whenever more of them wait than it has left, and
    than ``least``."""

    def __init__(self, k: int, merge: Callable[[Int64], Int64], least: int) -> None:
        self._merge, self._least = merge, least
        self._kept = np.empty((k, 0), np.int64)
        self._waiting: list[Int64] = []
        self._size = 0

    def add(self, *rows: Int64) -> None:
        """Add a block, int64 [n] each."""
        self._waiting.append(np.stack(rows))
        self._size += len(rows[0])
        if self._size > max(self._least, self._kept.shape[1]):
            self.merged()

    def merged(self) -> Int64:
        """What there is of all blocks so far."""
        self._kept = self._merge(np.concatenate([self._kept, *self._waiting], 1))
        self._waiting, self._size = [], 0
        return self._kept
