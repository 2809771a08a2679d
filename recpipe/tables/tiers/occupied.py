"""Tracks which rows are in slots and slab for the batch being trained, independent of plans for later
batches."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recpipe.common.loops import compiled
from recpipe.plugin.bags import RowIds, Slots
from recpipe.tables.tiers.plan import TierPlan


class Occupied:
    """What slots and slab hold for the batch being trained."""

    def __init__(self, slots: int) -> None:
        self.rows = np.full(slots, -1, np.int64)
        """The row in each slot; -1: the slot is empty."""
        self.slab: RowIds = np.empty(0, np.int64)
        """The rows in the slab's first places, int64 [S]."""
        self.count = 0
        """How many slots are not empty."""
        self._batches = self._filled = 0
        self._evicts = False

    def carry_out(self, plan: TierPlan) -> None:
        """Apply a plan's moves."""
        self.slab = plan.slab
        evicted = _moved(self.rows, plan.vacated, plan.slots, plan.placed)
        self._batches += 1
        self._evicts |= evicted > 0
        if len(plan.placed) > evicted:
            self._filled = self._batches
        self.count += len(plan.placed) - evicted

    @property
    def cold_start(self) -> bool:
        """Whether slots were still being filled in the last tenth of the batches, and none had lost its row:
        the cache was never full."""
        full = self._evicts or self.count == len(self.rows)
        return not full and self._filled > 0.9 * self._batches

    def restore(self, rows: RowIds) -> None:
        """Start with these rows in the slots (int64 [slots])."""
        self.rows[:] = rows
        self.count = int(np.count_nonzero(rows >= 0))

    def resident(self) -> RowIds:
        """The rows that are in a slot, sorted."""
        return np.sort(self.rows[self.rows >= 0])

    def slots_of(self, rows: RowIds) -> NDArray[np.int64]:
        """The slots of distinct resident ``rows``, int64 [n]."""
        used = np.flatnonzero(self.rows >= 0)
        used = used[np.argsort(self.rows[used])]
        found: NDArray[np.int64] = used[np.searchsorted(self.rows[used], rows)]
        assert np.array_equal(self.rows[found], rows), "the rows are resident"
        return found


@compiled
def _moved(held: RowIds, vacated: Slots, slots: Slots, placed: RowIds) -> int:
    """Empty the ``vacated`` slots and put the rows ``placed`` into ``slots``; returns how many were not empty
    before."""
    evicted = 0
    for slot in vacated:
        evicted += held[slot] >= 0
        held[slot] = -1
    for i in range(len(slots)):
        held[slots[i]] = placed[i]
    return evicted
