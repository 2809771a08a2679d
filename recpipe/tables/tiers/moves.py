"""The rows that a batch moves between tiers, as positions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recpipe.common.loops import compiled
from recpipe.plugin.bags import RowIds, Slots
from recpipe.tables.tiers.plan import TierPlan

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
    together: bool
    """Whether slots and slab are in one table. Departing rows are then in the order of their use."""
    in_slab: int
    """How many rows depart from the slab."""
    to_slots: int
    """How many fetched rows get a slot."""
    promoted: int
    """How many of the carried rows get a slot."""
    fetched: int
    """How many rows are fetched."""
    departing: Positions
    """Places of departing rows: those of the slab, then slots. If ``together``, of the rows to write, then of
    those that stay on the device."""
    leaving: Positions
    """Positions among the departing rows of those to write; empty if all are, or if ``together``."""
    carried: Positions
    """Positions among the departing rows of those that stay on the device; empty if ``together``."""
    targets: Positions
    """Places of fetched rows: slots, then those in the slab. Then of the carried rows: slots of the promoted,
    then those of the others, which stay in the slab."""

    @classmethod
    def of(
        cls,
        plan: TierPlan,
        slab: RowIds,
        slab_written: bool,
        slab_first: int,
        together: bool,
        frozen: bool = False,
    ) -> Moves:
        """The moves if ``slab`` holds these rows, which are also in the store if ``slab_written``.

        ``together``: whether slots and slab are in one table. ``frozen``: whether the store has all rows as
        they are, so that none is written.
        """
        counts, *arrays = _moves(
            slab,
            slab_written,
            frozen,
            slab_first,
            together,
            plan.evicted,
            plan.vacated,
            plan.slots,
            plan.carried_from,
        )
        to_slots, promoted, fetched = counts
        written, departing, leaving, carried, targets = arrays
        return cls(
            slab_first,
            written,
            len(written) == len(departing),
            together,
            len(slab),
            to_slots,
            promoted,
            fetched,
            departing,
            leaving,
            carried,
            targets,
        )

    @property
    def positions(self) -> list[Positions]:
        """What the device gets, in one copy."""
        return [self.departing, self.leaving, self.carried, self.targets]


@compiled
def _moves(
    slab: RowIds,
    slab_written: bool,
    frozen: bool,
    slab_first: int,
    together: bool,
    evicted: RowIds,
    vacated: Slots,
    slots: Slots,
    carried_from: Positions,
) -> tuple[tuple[int, int, int], RowIds, Positions, Positions, Positions, Positions]:
    """``Moves``' numbers ``to_slots``, ``promoted`` and ``fetched``, and its arrays in their order."""
    held, most = len(slab), len(slab) + len(evicted)
    rows, departing = np.empty(most, np.int64), np.empty(most, np.int64)
    # ``carried_from`` counts empty slots among the departures; they are left out here.
    position = np.empty(most, np.int64)
    count = 0
    for i in range(most):
        row = slab[i] if i < held else evicted[i - held]
        position[i], rows[count] = count, row
        departing[count] = slab_first + i if i < held else vacated[i - held]
        count += row >= 0
    stays = np.zeros(count, np.bool_)
    arriving = len(carried_from)
    carried, targets = np.empty(arriving, np.int64), np.empty(arriving, np.int64)
    fetched = on_device = from_store = to_slots = promoted = 0
    for i in range(arriving):
        fetched += carried_from[i] < 0
    for i in range(arriving):
        in_slot = i < len(slots)
        place = slots[i] if in_slot else slab_first + i - len(slots)
        if carried_from[i] < 0:
            targets[from_store] = place
            from_store += 1
            to_slots += in_slot
        else:
            carried[on_device], targets[fetched + on_device] = position[carried_from[i]], place
            stays[carried[on_device]] = True
            on_device += 1
            promoted += in_slot
    written, leaving = np.empty(count, np.int64), np.empty(count, np.int64)
    writes = 0
    for i in range(count):
        written[writes], leaving[writes] = rows[i], i
        writes += not (frozen or stays[i] or (slab_written and i < held))
    numbers = (to_slots, promoted, fetched)
    if together:
        used = np.empty(writes + on_device, np.int64)
        for i in range(writes):
            used[i] = departing[leaving[i]]
        for i in range(on_device):
            used[writes + i] = departing[carried[i]]
        return numbers, written[:writes], used, leaving[:0], carried[:0], targets
    all_leave = writes == count
    return (
        numbers,
        written[:writes],
        departing[:count],
        leaving[: 0 if all_leave else writes],
        carried[:on_device],
        targets,
    )
