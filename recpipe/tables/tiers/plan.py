"""What moves between tiers for one batch: a plan, the places that it stands for, and what they hold."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recpipe.common.loops import compiled
from recpipe.plugin.bags import RowIds, Slots

Positions = NDArray[np.int64]


@dataclass
class TierPlan:
    """The moves of one batch between tiers, and the tier of each of its rows: arrays alone, so that it can be
    undone and made again."""

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
    carried_from: Positions
    """For each row that arrives (``placed``, then ``slab``), its position among those that depart (the slab's
    of the batch before, then ``evicted``), or -1 if the store has it."""
    fetch: RowIds
    """The rows that the store must deliver, int64 [N]."""
    # lookups
    where: Slots
    """Where each row that is looked up is, once these have moved: its slot or, below ``IN_STORE``, ``-2``
    minus its position in the slab. int32 [L], or [U] if the bags have distinct rows."""
    looked_up: int
    """Number of the whole batch's lookups."""
    hits: int
    """The lookups whose row was resident before any row moved for the batch."""

    @property
    def fetches_residents(self) -> bool:
        """Whether lookups of resident rows must also wait for the store, since a row that gets a slot comes
        from there."""
        return bool((self.carried_from[: len(self.placed)] < 0).any())


@dataclass(frozen=True)
class Moves:
    """What ``advance`` and ``wait`` move for a batch, as positions. Slab places are counted in the slab's
    table, in which it begins at ``slab_first``."""

    slab_first: int
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
    written: RowIds
    """The rows to write to the store."""
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

    @property
    def positions(self) -> tuple[Positions, ...]:
        """What the device gets, in one copy."""
        return self.departing, self.leaving, self.carried, self.targets


class Occupied:
    """What slots and slab hold for the batch being trained, independent of plans for later batches."""

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
        evicted = _occupy(self.rows, plan.vacated, plan.slots, plan.placed)
        self._batches += 1
        self._evicts |= evicted > 0
        if len(plan.placed) > evicted:
            self._filled = self._batches
        self.count += len(plan.placed) - evicted

    def restore(self, rows: RowIds) -> None:
        """Start with these rows in the slots (int64 [slots])."""
        self.rows[:] = rows
        self.count = int(np.count_nonzero(rows >= 0))

    @property
    def cold_start(self) -> bool:
        """Whether slots were still being filled in the last tenth of the batches, and none had lost its row:
        the cache was never full."""
        full = self._evicts or self.count == len(self.rows)
        return not full and self._filled > 0.9 * self._batches


@compiled
def moves_of(
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
    """``Moves``' numbers ``to_slots``, ``promoted`` and ``fetched``, and its arrays in their order.

    ``slab``: the rows that it holds, which are also in the store if ``slab_written``. ``frozen``: the store
    has all rows as they are, so that none is written. The other arguments are those of ``Moves`` and of
    ``TierPlan``.
    """
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


@compiled
def _occupy(held: RowIds, vacated: Slots, slots: Slots, placed: RowIds) -> int:
    """Empty the ``vacated`` slots and put the rows ``placed`` into ``slots``; returns how many were not empty
    before."""
    evicted = 0
    for slot in vacated:
        evicted += held[slot] >= 0
        held[slot] = -1
    for i in range(len(slots)):
        held[slots[i]] = placed[i]
    return evicted
