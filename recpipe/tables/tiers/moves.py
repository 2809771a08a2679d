"""The rows that a batch moves between tiers, as positions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recpipe.plugin.policy import RowIds
from recpipe.tables.tiers.placement import TierPlan


@dataclass(frozen=True)
class Moves:
    """What ``advance`` moves for a batch, as positions that the device gets in one copy."""

    written: RowIds
    """The rows to write to the store."""
    all_leave: bool
    """Whether these are all departing rows."""
    positions: list[NDArray[np.int64]]
    """Slots of departing residents; then positions, among the departing rows (the slab's, then these), of
    carried rows and of those to write; slots of carried rows; and, for ``arrive``, slots of fetched rows and
    positions in the slab of fetched and of carried rows."""

    @classmethod
    def of(cls, plan: TierPlan, slab: RowIds, slab_written: bool) -> Moves:
        """The moves if ``slab`` holds these rows, which are also in the store if ``slab_written``."""
        left = np.flatnonzero(plan.evicted >= 0)
        rows = np.concatenate((slab, plan.evicted[left]))
        # ``carried_from`` counts empty slots among the departures; they are left out here.
        position = np.full(len(slab) + len(plan.evicted), -1)
        position[: len(slab)] = np.arange(len(slab))
        position[len(slab) + left] = len(slab) + np.arange(len(left))
        from_store = plan.carried_from < 0
        carried = position[plan.carried_from[~from_store]]
        leaving = np.ones(len(rows), bool)
        leaving[carried] = False
        if slab_written:
            leaving[: len(slab)] = False
        all_leave = bool(leaving.all())
        of_slots, of_slab = np.split(from_store, [len(plan.placed)])
        positions = (
            plan.vacated[left],
            carried,
            np.flatnonzero(leaving) if not all_leave else carried[:0],
            plan.slots[~of_slots],
            plan.slots[of_slots],
            np.flatnonzero(of_slab),
            np.flatnonzero(~of_slab),
        )
        return cls(rows[leaving], all_leave, [part.astype(np.int64) for part in positions])
