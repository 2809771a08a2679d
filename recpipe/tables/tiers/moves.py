"""The rows that a batch moves between tiers, as positions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recpipe.plugin.policy import RowIds
from recpipe.tables.tiers.placement import TierPlan

Positions = NDArray[np.int64]


@dataclass(frozen=True)
class Moves:
    """What ``advance`` and ``arrive`` move for a batch. Slab places are counted in the slab's table, in which
    it begins at ``slab_first``."""

    slab_first: int
    written: RowIds
    """The rows to write to the store."""
    all_leave: bool
    """Whether these are all departing rows."""
    in_slab: int
    """How many rows depart from the slab."""
    to_slots: int
    """How many fetched rows get a slot."""
    promoted: int
    """How many of the carried rows get a slot."""
    departing: Positions
    """Places of departing rows: those of the slab, then slots."""
    leaving: Positions
    """Positions among the departing rows of those to write; empty if all are."""
    carried: Positions
    """Positions among the departing rows of those that stay on the device."""
    carried_to: Positions
    """Their places: slots of the promoted, then those of the others, which stay in the slab."""
    fetched: Positions
    """Places of fetched rows: slots, then those in the slab."""

    @classmethod
    def of(cls, plan: TierPlan, slab: RowIds, slab_written: bool, slab_first: int) -> Moves:
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
        of_slots, of_slab = from_store[: len(plan.placed)], from_store[len(plan.placed) :]
        to_slots, promoted = plan.slots[of_slots], plan.slots[~of_slots]
        return cls(
            slab_first,
            rows[leaving],
            all_leave,
            len(slab),
            len(to_slots),
            len(promoted),
            departing=np.concatenate((slab_first + np.arange(len(slab)), plan.vacated[left])),
            leaving=carried[:0] if all_leave else np.flatnonzero(leaving),
            carried=carried,
            carried_to=np.concatenate((promoted, slab_first + np.flatnonzero(~of_slab))),
            fetched=np.concatenate((to_slots, slab_first + np.flatnonzero(of_slab))),
        )

    @property
    def positions(self) -> list[Positions]:
        """What the device gets, in one copy."""
        return [self.departing, self.leaving, self.carried, self.carried_to, self.fetched]
