"""What moves between tiers for one batch, and where its rows are then: arrays alone, so that a plan can be
undone and made again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recpipe.plugin.bags import RowIds, Slots


@dataclass
class TierPlan:
    """The moves of one batch between tiers, and the tier of each of its rows."""

    # rows that move before the batch is looked up
    slots: Slots
    """Resident slots that get a new row, int32 [P]."""
    placed: RowIds
    """The rows that those slots get, int64 [P]."""
    vacated: Slots
    """Slots that lose their row: ``slots``, then those that are emptied, int32 [E]."""
    evicted: RowIds
    """The rows that were in them, -1 for an empty slot, int64 [E]."""
    slab: RowIds
    """Rows of slab positions 0 .. S - 1, int64 [S]."""
    carried_from: NDArray[np.int64]
    """For each row in ``arrivals``, its position in ``departures``, or -1 if the store has it."""
    fetch: RowIds
    """The arrivals that the store must deliver, int64 [N]."""
    # lookups
    where: Slots
    """Where each row that is looked up is, once these have moved: its slot or, below ``IN_STORE``, ``-2``
    minus its position in the slab. int32 [L], or [U] if the bags have distinct rows."""
    looked_up: int
    """Number of the whole batch's lookups."""
    hits: int
    """The lookups whose row was resident before any row moved for the batch."""

    @property
    def arrivals(self) -> RowIds:
        """Rows that must be fetched or moved: first those for slots, then those for the slab."""
        return np.concatenate((self.placed, self.slab))

    @property
    def fetches_residents(self) -> bool:
        """Whether lookups of resident rows must also wait for the store, since a row that gets a slot comes
        from there."""
        return bool((self.carried_from[: len(self.placed)] < 0).any())
