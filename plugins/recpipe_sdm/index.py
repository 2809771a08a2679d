"""``RowIndex``: where the rows are that are in DRAM, in less memory than a number for every row."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recpipe.kit import compiled
from recpipe.plugin import RowIds

Places = NDArray[np.int32]
Words = NDArray[np.int64]
EMPTY = -2
"""The place of a row that has none."""
PRUNED = -1
"""The place of a pruned row, neither in DRAM nor on the SSD, which adds nothing; FBGEMM's number for it."""
ROWS_OF_A_WORD = 32
LOW = (1 << 32) - 1
State = tuple[Words, Places]
"""Which rows have slots, and these."""


class RowIndex:
    """The places of ``rows`` rows: the slot of each that has one, and the places of those that were read for
    a batch a moment ago. The caller has a lock.

    Of 32 rows a word says by a bit for each which have slots, and how many rows before them do; the slots are
    in an array, in the order of the rows. A look takes two reads for a row that has a slot, and one for most
    that have none. Rows that were read for a batch are in a hash table.

    Args:
        pruned: rows that add nothing to a lookup, int64 [n].
        changes: whether rows get slots and lose them: then there is room for the next state beside this one.
    """

    def __init__(self, rows: int, pruned: RowIds | None = None, changes: bool = False) -> None:
        self.rows, self._copies = rows, 2 if changes else 1
        self._words: Words = np.zeros(-(-rows // ROWS_OF_A_WORD), np.int64)
        self._slots: Places = np.empty(0, np.int32)
        self._pruned: Words = np.zeros(
            len(self._words) if pruned is not None and len(pruned) else 0, np.int64
        )
        if len(self._pruned):
            assert pruned is not None
            np.bitwise_or.at(self._pruned, pruned >> 5, np.left_shift(1, pruned & 31))
        self.version = 0
        """Another number once other rows have slots."""
        self._held = 0
        self._keys: RowIds = np.full(16, -1)
        self._at: Places = np.empty(16, np.int32)

    def find(self, rows: RowIds) -> tuple[RowIds, RowIds]:
        """The place of each of ``rows`` (int64 [n], with repeats), int64 [n], and where among them those are
        that have no slot and are not pruned. A negative number stands for a place itself: that of
        ``elsewhere``. ``IndexError`` for a row that does not exist."""
        found: tuple[RowIds, RowIds] = _find(
            self._words, self._slots, self._pruned, self._keys, self._at, self.rows, rows
        )
        return found

    def without_slots(self, rows: RowIds) -> RowIds:
        """The ``rows`` that have no slot and are not pruned; needs no lock where slots are changed."""
        nothing = np.full(1, -1), np.empty(1, np.int32)
        return rows[_find(self._words, self._slots, self._pruned, *nothing, self.rows, rows)[1]]

    def held(self, rows: RowIds) -> Places:
        """The place of each of ``rows`` among those that were read for a batch, or ``EMPTY``."""
        found: Places = _held(self._keys, self._at, rows)
        return found

    def hold(self, rows: RowIds, places: Places) -> None:
        """Note that ``rows`` (distinct, without slots) are in these places."""
        if 2 * (self._held + len(rows)) > len(self._keys):
            keys, at = self._keys, self._at
            size = 1 << (2 * (self._held + len(rows))).bit_length()
            self._keys, self._at = np.full(size, -1), np.empty(size, np.int32)
            _hold(self._keys, self._at, keys[keys >= 0], at[keys >= 0])
        self._held += _hold(self._keys, self._at, rows, places)

    def forget(self, rows: RowIds) -> None:
        """Note that those of ``rows`` that were read for a batch are no longer there."""
        self._held -= _forget(self._keys, self._at, rows)

    def change(self, entering: RowIds, slots: Places, leaving: RowIds) -> None:
        """Give ``slots`` to the rows ``entering`` (distinct, without slots) and take those of ``leaving``."""
        self.become(self.changed(entering, slots, leaving))
        self.forget(entering)  # one that loses its slot again may have been replaced meanwhile

    def changed(self, entering: RowIds, slots: Places, leaving: RowIds) -> State:
        """What it would be then, beside what it is; ``entering`` rows may have other slots. Needs no lock
        where nobody else changes slots. Rows that enter and leave again must be forgotten before they do."""
        found: State = _changed(self._words, self._slots, self.rows, entering, slots, leaving)
        return found

    def become(self, state: State) -> None:
        """Be in this state of its slots from now on."""
        self._words, self._slots = state
        self.version += 1

    def slots_of(self, rows: RowIds) -> Places:
        """The slot of each of ``rows``, int32, or ``EMPTY``; needs no lock where slots are not changed."""
        nothing = np.full(1, -1), np.empty(1, np.int32)
        found = _find(self._words, self._slots, self._pruned, *nothing, self.rows, rows)[0]
        places: Places = found.astype(np.int32)
        return places

    def slotted(self, start: int, stop: int) -> RowIds:
        """Which of the rows [start, stop) have slots, ascending."""
        found: RowIds = _slotted(self._words, start, stop)
        return found

    @property
    def nbytes(self) -> int:
        """Memory of what says which rows have slots, with the room for its next state."""
        return self._copies * (self._words.nbytes + self._slots.nbytes) + self._pruned.nbytes

    @property
    def held_nbytes(self) -> int:
        """Memory of what says where rows are that were read for a batch."""
        return self._keys.nbytes + self._at.nbytes


def index_bytes(rows: int, slots: int, changes: bool, pruned: bool = False) -> int:
    """``RowIndex.nbytes`` for so many slots."""
    words = 8 * -(-rows // ROWS_OF_A_WORD)
    return (2 if changes else 1) * (words + 4 * slots) + (words if pruned else 0)


def elsewhere(places: RowIds) -> RowIds:
    """Numbers by which ``find`` gives these places (from -1 on), of rows that it has nothing to do with; and
    the places of such numbers."""
    return -2 - places


@compiled
def numbered(rows: RowIds, offsets: RowIds, samples: int, base: RowIds) -> tuple[RowIds, int]:
    """The numbers by which ``find`` finds ``rows`` of several tables, and how many of them are in an index;
    ``base``: of each table the number of its row 0 there, -1: it is ``elsewhere``. ``offsets``: so many
    ``samples`` of each table."""
    found, inside = np.empty(len(rows), np.int64), 0
    for part in range(len(base)):
        start, stop = offsets[part * samples], offsets[(part + 1) * samples]
        if base[part] >= 0:
            inside += stop - start
        for i in range(start, stop):
            found[i] = rows[i] + base[part] if base[part] >= 0 else elsewhere(rows[i])
    return found, inside


def _ones(bits: int) -> int:
    """How many of 32 bits are 1."""
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    return ((((bits + (bits >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24) & 0xFF


def _first(row: int, size: int) -> int:
    """Where in a hash table of ``size`` (a power of two) a row is, or behind."""
    return (((row ^ (row >> 31)) & 0x7FFFFFFF) * 2654435761 >> 15) & (size - 1)


@compiled
def _find(
    words: Words, slots: Places, pruned: Words, keys: RowIds, at: Places, count: int, rows: RowIds
) -> tuple[RowIds, RowIds]:
    places, cold, missing = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64), 0
    for i in range(len(rows)):
        row = rows[i]
        if row < 0:
            places[i] = elsewhere(row)
            continue
        if row >= count:
            raise IndexError("a row that is in no table")
        word = words[row >> 5]
        before = row & 31
        if (word >> before) & 1:
            places[i] = slots[(word >> 32) + _ones(word & ((1 << before) - 1))]
        else:
            cold[missing] = i
            missing += 1
    absent = 0
    for j in range(missing):
        i = cold[j]
        row = rows[i]
        if len(pruned) and (pruned[row >> 5] >> (row & 31)) & 1:
            places[i] = PRUNED
            continue
        place, size = _first(row, len(keys)), len(keys)
        while keys[place] != row and keys[place] != -1:
            place = (place + 1) & (size - 1)
        places[i] = at[place] if keys[place] == row else EMPTY
        cold[absent] = i
        absent += 1
    return places, cold[:absent]


@compiled
def _held(keys: RowIds, at: Places, rows: RowIds) -> Places:
    found, size = np.empty(len(rows), np.int32), len(keys)
    for i in range(len(rows)):
        place = _first(rows[i], size)
        while keys[place] != rows[i] and keys[place] != -1:
            place = (place + 1) & (size - 1)
        found[i] = at[place] if keys[place] == rows[i] else EMPTY
    return found


@compiled
def _hold(keys: RowIds, at: Places, rows: RowIds, places: Places) -> int:
    """How many of ``rows`` are new."""
    new, size = 0, len(keys)
    for i in range(len(rows)):
        place = _first(rows[i], size)
        while keys[place] != rows[i] and keys[place] != -1:
            place = (place + 1) & (size - 1)
        new += keys[place] == -1
        keys[place], at[place] = rows[i], places[i]
    return new


@compiled
def _forget(keys: RowIds, at: Places, rows: RowIds) -> int:
    """How many of ``rows`` were there. Those behind one move up, so that no hole is left before them."""
    gone, size = 0, len(keys)
    for i in range(len(rows)):
        place = _first(rows[i], size)
        while keys[place] != rows[i] and keys[place] != -1:
            place = (place + 1) & (size - 1)
        if keys[place] == -1:
            continue
        gone += 1
        hole, place = place, (place + 1) & (size - 1)
        while keys[place] != -1:
            wanted = _first(keys[place], size)
            if ((place - wanted) & (size - 1)) >= ((place - hole) & (size - 1)):
                keys[hole], at[hole] = keys[place], at[place]
                hole = place
            place = (place + 1) & (size - 1)
        keys[hole] = -1
    return gone


@compiled
def _changed(
    words: Words, slots: Places, count: int, entering: RowIds, given: Places, leaving: RowIds
) -> tuple[Words, Places]:
    for rows in (entering, leaving):
        for row in rows:
            if not 0 <= row < count:
                raise IndexError("a row that is in no table")
    new = np.empty(len(words), np.int64)
    for w in range(len(words)):
        new[w] = words[w] & LOW
    for row in leaving:
        new[row >> 5] &= ~(1 << (row & 31))
    for row in entering:
        new[row >> 5] |= 1 << (row & 31)
    total = 0
    for w in range(len(words)):
        ones = _ones(new[w])
        new[w] |= total << 32
        total += ones
    places = np.empty(total, np.int32)
    for w in range(len(words)):
        to, source = new[w] >> 32, words[w] >> 32
        for bit in range(32):
            was, now = (words[w] >> bit) & 1, (new[w] >> bit) & 1
            if was and now:
                places[to] = slots[source]
            to += now
            source += was
    for i in range(len(entering)):
        row = entering[i]
        word = new[row >> 5]
        places[(word >> 32) + _ones(word & ((1 << (row & 31)) - 1))] = given[i]
    return new, places


@compiled
def _slotted(words: Words, start: int, stop: int) -> RowIds:
    found, count = np.empty(max(0, stop - start), np.int64), 0
    for row in range(start, stop):
        found[count] = row
        count += (words[row >> 5] >> (row & 31)) & 1
    return found[:count].copy()
