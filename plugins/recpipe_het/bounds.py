"""Bounds on how stale a table's rows may be."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from recpipe_het.messages import Rows


@dataclass(frozen=True)
class Bounds:
    """Rows from ``bases[t]`` to ``bases[t + 1]`` (int64 [T + 1]) may lack up to ``updates[t]`` updates (int64
    [T])."""

    bases: Rows
    updates: Rows

    def of(self, rows: Rows) -> Rows:
        """The bound of each row, int64 [n]."""
        if self._same:
            return np.full(len(rows), self.updates[0])
        return self.updates[np.searchsorted(self.bases, rows, side="right") - 1]

    @cached_property
    def _same(self) -> bool:
        return bool((self.updates == self.updates[0]).all())

    def part(self, index: int, holders: int) -> Bounds:
        """The same bounds for rows numbered within the part of holder ``index``, which has every
        ``holders``-th row."""
        return Bounds(-((index - self.bases) // holders), self.updates)
