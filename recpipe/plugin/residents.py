"""Which rows are resident, and a number of each row that a cache policy keeps in the same memory.

A map has 4 bytes for each row:

    0 and above                 the row is in this slot
    IN_STORE                    it is in the cold store
    IN_STORE - 1 .. NOTED + 1   it is in the slab, at place -2 - code
    NOTED and below             it is in the cold store, and its note is NOTED - code

So the note of a row in the store takes no memory of its own. That of a row in a slot or in the slab is kept
by slot and by place, and goes with the row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from recpipe.common.loops import compiled
from recpipe.plugin.bags import RowIds, Slots

IN_STORE = -1
NOTED = -(1 << 30)
MOST = (1 << 30) - 1
"""The highest note."""
CHUNK = 1 << 20
"""Rows whose notes are read or written at a time where those of many are."""
_NO_NOTES = np.empty(0, np.int32)


def in_slab(where: Slots) -> NDArray[np.bool_]:
    """Which entries of the map are of rows in the slab."""
    found: NDArray[np.bool_] = (where < IN_STORE) & (where > NOTED)
    return found


class Notes:
    """A number in [0, ``MOST``] for each row, 0 at first: how often it was looked up, say, with a mark in the
    lowest bit. ``notes[rows]`` reads and ``notes[rows] = values`` writes those of rows (int64 [n]) or of a
    slice of all rows; values are int32 [n]."""

    def __init__(self, where: Slots, slots: int) -> None:
        self._where = where
        self.of_slot = np.zeros(slots, np.int32)
        """Those of the rows in slots, int32 [slots], which the policy may write; of an empty slot it means
        nothing."""
        self.of_slab = _NO_NOTES
        """Those of the rows in the slab, by their places; core writes it."""

    def __len__(self) -> int:
        return len(self._where)

    def __getitem__(self, rows: slice | RowIds) -> NDArray[np.int32]:
        if not isinstance(rows, slice):
            return _read(self._where, self.of_slot, self.of_slab, rows)
        start, stop, _ = rows.indices(len(self))
        found = np.empty(max(0, stop - start), np.int32)
        for begin in range(start, stop, CHUNK):
            some = np.arange(begin, min(begin + CHUNK, stop))
            found[begin - start : begin - start + len(some)] = self[some]
        return found

    def __setitem__(self, rows: slice | RowIds, values: NDArray[np.int32]) -> None:
        if not isinstance(rows, slice):
            _write(self._where, self.of_slot, self.of_slab, rows, values)
            return
        start, stop, _ = rows.indices(len(self))
        for begin in range(start, stop, CHUNK):
            some = np.arange(begin, min(begin + CHUNK, stop))
            self[some] = values[begin - start : begin - start + len(some)]

    def add(self, rows: RowIds, times: NDArray[np.int32] | None, unit: int = 1) -> None:
        """Add ``unit`` (a power of two) for each lookup of a batch: ``rows`` and how many ``times`` each, as
        ``CachePolicy.times`` says. A note stays at the highest multiple of the unit, with the lower bits that
        it has. ``IndexError`` for a row that does not exist."""
        _add(self._where, self.of_slot, self.of_slab, rows, _NO_NOTES if times is None else times, unit)

    def clear(self) -> None:
        """Forget those of all rows, none of which is in a slot or in the slab any more."""
        self.of_slot.fill(0)
        self.of_slab = _NO_NOTES


class Residents:
    """Which rows are resident once every placement so far has been carried out; read only for policies.

    Core writes it by ``put`` and ``empty``. A plugin that keeps rows in slots of its own may use these too.
    """

    def __init__(self, rows: int, slots: int) -> None:
        self._where = np.full(rows, IN_STORE, np.int32)
        self._row_of_slot = np.full(slots, -1, np.int64)
        self.notes: Notes | None = None
        """The notes of a policy that keeps some (``keep_notes``)."""

    def keep_notes(self) -> Notes:
        """Keep a number for each row from now on."""
        self.notes = Notes(self._where, len(self._row_of_slot))
        return self.notes

    @property
    def row_of_slot(self) -> RowIds:
        """The row in each slot, or -1 if the slot is empty: int64 [slots], read only."""
        view = self._row_of_slot.view()
        view.flags.writeable = False
        return view

    def slot_of(self, rows: RowIds) -> Slots:
        """The slot of each of ``rows``, or -1 if the row is not resident: int32 [n]."""
        slots: Slots = np.maximum(self._where[rows], IN_STORE)
        return slots

    @property
    def rows(self) -> RowIds:
        """The resident rows, in the order of their slots."""
        return self._row_of_slot[self._row_of_slot >= 0]

    @property
    def nbytes(self) -> int:
        """Host memory of the maps: 4 bytes per row and 8 per slot, and with notes 4 more per slot."""
        noted = 0 if self.notes is None else self.notes.of_slot.nbytes
        return self._where.nbytes + self._row_of_slot.nbytes + noted

    @property
    def noted(self) -> tuple[Slots, Slots, bool]:
        """The notes by slot and by place in the slab, for loops, and whether there are any."""
        kept = self.notes
        return (_NO_NOTES, _NO_NOTES, False) if kept is None else (kept.of_slot, kept.of_slab, True)

    def put(self, slots: Slots, rows: RowIds) -> RowIds:
        """Put ``rows`` into ``slots``; returns the rows that were there (-1: the slot was empty).
        ``IndexError`` for one that does not exist."""
        if not len(slots) and not len(rows):
            return np.empty(0, np.int64)
        leaving: RowIds = _put(self._where, self._row_of_slot, *self.noted, slots, rows)
        return leaving

    def empty(self, slots: Slots) -> RowIds:
        """Empty ``slots``; returns the rows that were there (-1: the slot was empty)."""
        if not len(slots):
            return np.empty(0, np.int64)
        leaving = self._row_of_slot[slots]
        held = leaving >= 0
        notes = None if self.notes is None else self.notes[leaving[held]]
        self._where[leaving[held]] = IN_STORE
        if self.notes is not None and notes is not None:
            self.notes[leaving[held]] = notes
        self._row_of_slot[slots] = -1
        return leaving


def _note(code: Any, of_slot: Any, of_slab: Any) -> Any:
    if code >= 0:
        return np.int64(of_slot[code])
    if code <= NOTED:
        return np.int64(NOTED - code)
    return np.int64(0) if code == IN_STORE else np.int64(of_slab[-2 - code])


def _set(where: Any, of_slot: Any, of_slab: Any, row: Any, note: Any) -> None:
    code = where[row]
    if code >= 0:
        of_slot[code] = note
    elif code <= NOTED or code == IN_STORE:
        where[row] = NOTED - note
    else:
        of_slab[-2 - code] = note


@compiled
def _put(
    where: Slots,
    row_of_slot: RowIds,
    of_slot: Slots,
    of_slab: Slots,
    noted: bool,
    slots: Slots,
    rows: RowIds,
) -> RowIds:
    if len(rows) != len(slots):
        raise IndexError("as many rows as slots are asked for")
    for i in range(len(slots)):
        if not (0 <= slots[i] < len(row_of_slot) and 0 <= rows[i] < len(where)):
            raise IndexError("a slot or a row that does not exist")
    leaving = np.empty(len(slots), np.int64)
    for i in range(len(slots)):
        leaving[i] = row_of_slot[slots[i]]
        if leaving[i] >= 0:
            where[leaving[i]] = NOTED - of_slot[slots[i]] if noted else IN_STORE
    for i in range(len(slots)):
        if noted:
            of_slot[slots[i]] = _note(where[rows[i]], of_slot, of_slab)
        where[rows[i]] = slots[i]
        row_of_slot[slots[i]] = rows[i]
    return leaving


@compiled
def _read(where: Slots, of_slot: Slots, of_slab: Slots, rows: RowIds) -> NDArray[np.int32]:
    found = np.empty(len(rows), np.int32)
    for i in range(len(rows)):
        if not 0 <= rows[i] < len(where):
            raise IndexError("a row that is in no table")
        found[i] = _note(where[rows[i]], of_slot, of_slab)
    return found


@compiled
def _write(where: Slots, of_slot: Slots, of_slab: Slots, rows: RowIds, values: NDArray[np.int32]) -> None:
    if len(values) != len(rows):
        raise IndexError("as many notes as rows are asked for")
    for i in range(len(rows)):
        if not (0 <= rows[i] < len(where) and 0 <= values[i] <= MOST):
            raise IndexError("a row that is in no table, or a note that is none")
        _set(where, of_slot, of_slab, rows[i], values[i])


@compiled
def _add(
    where: Slots, of_slot: Slots, of_slab: Slots, rows: RowIds, times: NDArray[np.int32], unit: int
) -> None:
    """``times``: how often each is looked up; empty: once."""
    each, below = len(times) > 0, unit - 1
    for i in range(len(rows)):
        row = rows[i]
        if not 0 <= row < len(where):
            raise IndexError("a row that is in no table")
        before = _note(where[row], of_slot, of_slab)
        after = before + unit * (np.int64(times[i]) if each else 1)
        if after > MOST:
            after = MOST - below + (before & below)
        _set(where, of_slot, of_slab, row, after)
