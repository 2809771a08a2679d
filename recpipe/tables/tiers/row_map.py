"""The map from rows to tiers while a batch is planned: two loops, before and after the policy admits rows.

Each is one call although it does several things, because each call lets go of Python's lock and asks for it
again, which takes as long as a short loop where several threads run Python. ``recpipe.plugin.residents`` says
what the map has of a row, and what the notes are that go with rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from recpipe.common.loops import compiled
from recpipe.plugin.bags import RowIds, Slots
from recpipe.plugin.residents import IN_STORE, NOTED

Places = NDArray[np.int64]


def require(where: Slots, row_of_slot: RowIds, slots: Slots, placed: RowIds, freed: Slots) -> None:
    """``IndexError`` unless these slots and rows exist."""
    for i in range(len(slots)):
        if not (0 <= slots[i] < len(row_of_slot) and 0 <= placed[i] < len(where)):
            raise IndexError("a slot or a row that does not exist")
    for slot in freed:
        if not 0 <= slot < len(row_of_slot):
            raise IndexError("a slot or a row that does not exist")


def note_of(code: Any, of_slab: Any) -> Any:
    """The note of a row that is in no slot, by what the map has of it."""
    if code <= NOTED:
        return np.int64(NOTED - code)
    return np.int64(0) if code == IN_STORE else np.int64(of_slab[-2 - code])


@compiled
def migrate(
    where: Slots,
    row_of_slot: RowIds,
    of_slot: Slots,
    of_slab: Slots,
    noted: bool,
    rows: RowIds,
    times: Slots,
    slots: Slots,
    placed: RowIds,
    freed: Slots,
) -> tuple[int, Slots, Places, RowIds, Slots, RowIds, Slots]:
    """Find the ``rows`` of a batch (int64 [L]) before and after the policy's first placement: ``placed`` get
    ``slots``, and ``freed`` ones are emptied. ``times``: how often each of ``rows`` is looked up, which are
    then distinct (int32 [L]); empty if they have repeats. ``of_slot`` and ``of_slab``: the notes of rows in
    slots and in the slab, if there are any (``noted``).

    Returns how many lookups were of no resident row before; where each row is now (int32 [L]); the positions
    of those in no slot; these rows, distinct, in the order of their last lookups; the slots of the others, in
    the order of ``rows``; what was in ``slots`` and then in ``freed``, -1 if nothing (int64); and where each
    of ``placed`` was (int32). ``IndexError`` for a slot or a row that does not exist.
    """
    require(where, row_of_slot, slots, placed, freed)
    # Written in any case and counted if so: a branch that the processor cannot foresee takes longer.
    once = len(times) > 0
    found, places = np.empty(len(rows), np.int32), np.empty(len(rows), np.int64)
    missed = missing = 0
    for i in range(len(rows)):
        found[i] = where[rows[i]]
        places[missing] = i
        missing += found[i] < 0
        if once:
            missed += times[i] * (found[i] < 0)
    if not once:
        missed = missing

    evicted = np.empty(len(slots) + len(freed), np.int64)
    placed_from = np.empty(len(slots), np.int32)
    leave = False
    for i in range(len(slots)):
        placed_from[i] = where[placed[i]]
    for i in range(len(evicted)):
        slot = slots[i] if i < len(slots) else freed[i - len(slots)]
        evicted[i] = row_of_slot[slot]
        row_of_slot[slot] = -1
        if evicted[i] >= 0:
            where[evicted[i]] = NOTED - of_slot[slot] if noted else IN_STORE
            leave = True
    for i in range(len(slots)):
        if noted:
            of_slot[slots[i]] = note_of(where[placed[i]], of_slab)
        where[placed[i]] = slots[i]
        row_of_slot[slots[i]] = placed[i]
    if leave:  # any row may have left
        missing = 0
        for i in range(len(rows)):
            found[i] = where[rows[i]]
            places[missing] = i
            missing += found[i] < 0
    elif len(slots):  # only missing rows have come
        still = 0
        for place in places[:missing]:
            found[place] = where[rows[place]]
            places[still] = place
            still += found[place] < 0
        missing = still
    places = places[:missing]

    if once:
        misses = np.empty(missing, np.int64)
        for i in range(missing):
            misses[i] = rows[places[i]]
    else:
        distinct, before = np.empty(missing, np.int64), np.empty(missing, np.int32)
        first = missing
        for i in range(missing - 1, -1, -1):
            row = rows[places[i]]
            if where[row] < 0:  # a mark, until all have been seen
                first -= 1
                distinct[first], before[first] = row, where[row]
                where[row] = 0
        for i in range(first, missing):
            where[distinct[i]] = before[i]
        misses = distinct[first:]

    hits = found
    if missing:
        hits, count = np.empty(len(rows), np.int32), 0
        for slot in found:
            hits[count] = slot
            count += int(slot >= 0)
        hits = hits[:count]
    return missed, found, places, misses, hits, evicted, placed_from


@compiled
def admit(
    where: Slots,
    row_of_slot: RowIds,
    of_slot: Slots,
    of_slab: Slots,
    noted: bool,
    rows: RowIds,
    found: Slots,
    places: Places,
    misses: RowIds,
    slots: Slots,
    placed: RowIds,
    freed: Slots,
    moved: int,
    left: RowIds,
    moved_from: Slots,
    slab_before: RowIds,
    carry: bool,
) -> tuple[RowIds, RowIds, Places, RowIds, Slots]:
    """Carry out the policy's second placement, and put the rows into the slab that are in no slot then.

    ``slots``, ``placed`` and ``freed``: those of both placements, of which the first has so many slots as
    ``moved`` and had ``left`` and ``moved_from`` (``evicted`` and ``placed_from`` of ``migrate``). ``found``
    is completed at ``places``. ``slab_before``: the rows of the batch before in the slab. Without ``carry``,
    rows do not pass from slab to slab but through the store. ``of_slab``: the notes of ``slab_before``.

    Returns ``TierPlan``'s ``evicted``, ``slab``, ``carried_from`` and ``fetch``, and the slab's notes, int32
    [S] if there are any. ``IndexError`` as there.
    """
    first_freed = len(left) - moved
    require(where, row_of_slot, slots[moved:], placed[moved:], freed[first_freed:])
    carried_from = np.full(len(slots) + len(misses), -1)
    for i in range(len(slots)):
        before = moved_from[i] if i < moved else where[placed[i]]
        if NOTED < before < IN_STORE:
            carried_from[i] = -2 - before
    evicted = np.empty(len(slots) + len(freed), np.int64)
    leave = False
    for i in range(len(left)):
        evicted[i if i < moved else len(slots) + i - moved] = left[i]
        leave = leave or left[i] >= 0
    for i in range(moved, len(slots)):
        evicted[i] = row_of_slot[slots[i]]
        if evicted[i] >= 0:
            where[evicted[i]] = NOTED - of_slot[slots[i]] if noted else IN_STORE
    for i in range(first_freed, len(freed)):
        row = row_of_slot[freed[i]]
        row_of_slot[freed[i]] = -1
        if row >= 0:
            where[row] = NOTED - of_slot[freed[i]] if noted else IN_STORE
        evicted[len(slots) + i] = row
    for i in range(moved, len(slots)):
        if noted:
            of_slot[slots[i]] = note_of(where[placed[i]], of_slab)
        where[placed[i]] = slots[i]
        row_of_slot[slots[i]] = placed[i]

    slab = np.empty(len(misses), np.int64)
    count = 0
    for row in misses:
        if where[row] < 0:
            slab[count] = row
            if carry and NOTED < where[row] < IN_STORE:
                carried_from[len(slots) + count] = -2 - where[row]
            count += 1
    slab = slab[:count]
    carried_from = carried_from[: len(slots) + count]

    arrivals = np.concatenate((placed, slab))
    if leave:
        # Rows that the first placement has removed may be needed after all; the second one removes none that
        # the batch looks up.
        arriving, leaving = np.empty(len(arrivals), np.int32), np.empty(len(left), np.int32)
        for i in range(len(arrivals)):
            arriving[i] = where[arrivals[i]]
        for i in range(len(left)):
            if left[i] >= 0:
                leaving[i] = where[left[i]]
        for row in arrivals:
            where[row] = IN_STORE
        for i in range(len(left)):
            if left[i] >= 0:
                where[left[i]] = -2 - (i if i < moved else len(slots) + i - moved)
        for i in range(len(arrivals)):
            at = where[arrivals[i]]
            if at < IN_STORE:
                carried_from[i] = len(slab_before) - 2 - at
        # A row may leave its slot and come back into the slab, so the entries of arrivals are restored last.
        for i in range(len(left)):
            if left[i] >= 0:
                where[left[i]] = leaving[i]
        for i in range(len(arrivals)):
            where[arrivals[i]] = arriving[i]

    for i in range(len(slab_before)):
        if NOTED < where[slab_before[i]] < IN_STORE:
            where[slab_before[i]] = NOTED - of_slab[i] if noted else IN_STORE
    in_slab = np.empty(len(slab) if noted else 0, np.int32)
    for i in range(len(slab)):
        if noted:
            in_slab[i] = note_of(where[slab[i]], of_slab)
        where[slab[i]] = -2 - i
    for place in places:
        found[place] = where[rows[place]]

    fetch = np.empty(len(arrivals), np.int64)
    fetched = 0
    for i in range(len(arrivals)):
        fetch[fetched] = arrivals[i]
        fetched += carried_from[i] < 0
    return evicted, slab, carried_from, fetch[:fetched], in_slab
