"""The index of ids that grow, as compiled loops: which row of a table an id has, and which row is given away.

``records`` int64 [2 * capacity] has the key of row r at 2 r, and behind it, in one number, how often the
row's id was seen and the batch in which it was seen last. ``slots`` uint32 are a hash table with open
addressing: the row of the key that belongs there, in ``bits`` bits, and above them what is left of 32 bits
with some of the key's hash, so that other keys' records need not be read; or 0. They are in buckets of
``BUCKET``, which are compared at once. A key is in the first slot from its bucket on that was free; a row
that leaves lets those behind it move up, so that no slot is lost, and a bucket's free slots are its last.

Rows that may be given away are in a heap, those that go first on top. It has all rows up to a bound, perhaps
at an earlier score of theirs: scores only grow, so that a row on top whose score is still the same is the
lowest of all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from recpipe.common.instructions import LANES, alike, lowest_bit, prefetch
from recpipe.common.loops import compiled
from recpipe.data.id_mapper import MISSING_KEY

MISSING_ROW, DEFAULT_ROW, FIRST_ROW = 0, 1, 2
"""The row of missing values, that of ids without a row of their own, and the first one of an id."""
BUCKET = LANES
AHEAD = 32
"""Memory is asked for so many keys before it is read, twice: a key's bucket, and then its row's record."""
HASHED = 128
"""Keys that are hashed together."""
SEEN_BITS = 32
_SEEN = (1 << SEEN_BITS) - 1
_MOST = (1 << 31) - 1
_LOW, _HALF, _NONE, _ONE, _TWO = (np.uint64(number) for number in (0xFFFFFFFF, 32, 0, 1, 2))
_LAST, _BUCKET_BITS = np.uint64(BUCKET - 1), np.uint64(BUCKET.bit_length() - 1)
"""Numbers without a sign, with which numba makes no others, and looks at no index for one."""


def _mixed(key: int | np.uint64) -> np.uint64:
    """splitmix64's last step, which spreads similar numbers over all."""
    mixed = np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _home(mixed: np.uint64, size: int) -> Any:
    """The first slot of a ``mixed`` key's bucket among ``size`` < 2**32: a product instead of a slower
    remainder."""
    return np.int64(((mixed >> np.uint64(32)) * np.uint64(size // BUCKET)) >> np.uint64(32)) * BUCKET


def _mark(mixed: np.uint64, bits: int) -> Any:
    """As many bits of a mixed key as a slot has beside ``bits`` of a row."""
    return np.int64((mixed & np.uint64(0xFFFFFFFF)) >> np.uint64(bits))


def _hash(keys: Any, at: Any, marks: Any, buckets: np.uint64, shift: np.uint64) -> None:
    """The first slot of each key's bucket into ``at``, and its mark where a slot has it, above ``shift``
    bits, into ``marks``. This loop alone is one that compilers make vector instructions of."""
    for place in range(len(keys)):
        mixed = _mixed(keys[place])
        at[place] = (mixed >> _HALF) * buckets >> _HALF << _BUCKET_BITS
        marks[place] = (mixed & _LOW) >> shift << shift


def _searched(key: int, slots: NDArray[np.uint32], bits: int, records: NDArray[np.int64]) -> Any:
    """The row of ``key``, -1 if it has none: slot by slot, where one with its mark has another key."""
    size, mask = len(slots), (1 << bits) - 1
    mixed = _mixed(key)
    slot, mark = _home(mixed, size), _mark(mixed, bits)
    while slots[slot] != 0:
        row = np.int64(slots[slot]) & mask
        if np.int64(slots[slot]) >> bits == mark and records[2 * row] == key:
            return row
        slot = slot + 1 if slot + 1 < size else 0
    return np.int64(-1)


@compiled
def look_up(
    keys: NDArray[np.int64],
    slots: NDArray[np.uint32],
    bits: int,
    records: NDArray[np.int64],
    rows: NDArray[np.int64],
    now: int,
    touched: NDArray[np.int64],
    states: NDArray[np.int64],
) -> tuple[int, int]:
    """Write the row of each of ``keys`` [n] into ``rows`` [n]: -1 if it has none. Returns how many rows are
    noted, and how many keys have none.

    In a batch ``now``, from 1 on, ids with a row are noted as seen: each of these rows and its state before
    are written into ``touched`` and ``states`` [n]. With 0 nothing is noted.

    A key goes through three steps, ``AHEAD`` other keys apart, so that what lies at random places in memory
    is on its way while others are worked on. Asked for all at once, it would have to queue.
    """
    count, missed, total, ahead = _NONE, 0, np.uint64(len(keys)), np.uint64(AHEAD)
    work, ring = np.empty((2, 2 * HASHED), np.uint64), np.uint64(2 * HASHED - 1)
    at, marks = work[0], work[1]
    end, shift, mask = np.uint64(len(slots)), np.uint64(bits), (_ONE << np.uint64(bits)) - _ONE
    for first in range(_NONE, total + _TWO * ahead):
        if first < total:
            place = first & ring
            if first % np.uint64(HASHED) == _NONE:
                some = keys[first : min(first + np.uint64(HASHED), total)]
                _hash(some, at[place:], marks[place:], end // np.uint64(BUCKET), shift)
            prefetch(slots, at[place])
        if ahead <= first < total + ahead:
            place = (first - ahead) & ring
            slot, mark = at[place], marks[place]
            same = alike(slots, slot, mark, mask)
            while same == _NONE and slots[slot + _LAST] != 0:
                slot = slot + _LAST + _ONE if slot + _LAST + _ONE < end else _NONE
                same = alike(slots, slot, mark, mask)
            at[place] = slots[slot + lowest_bit(same)] & mask if same != _NONE else _NONE
            prefetch(records, at[place] << _ONE)
        if first < _TWO * ahead:
            continue
        number = first - _TWO * ahead
        key, row = keys[number], at[number & ring]
        if row == _NONE or records[row << _ONE] != key:
            found: Any = MISSING_ROW
            if key != MISSING_KEY:
                found = _searched(key, slots, bits, records) if row != _NONE else -1
                missed += found < 0
            rows[number] = found
            if found < FIRST_ROW:
                continue
            row = np.uint64(found)
        rows[number] = np.int64(row)
        if now > 0:
            place = row << _ONE | _ONE
            state = np.uint64(records[place])
            touched[count], states[count] = np.int64(row), np.int64(state)
            count += np.uint64(state & _LOW != np.uint64(now))  # kept if it is the batch's first sight of it
            times = state >> _HALF
            times = times + _ONE if times < np.uint64(_MOST) else times
            records[place] = np.int64(times << _HALF | np.uint64(now))
    return int(count), missed


@compiled
def insert(rows: NDArray[np.int64], slots: NDArray[np.uint32], bits: int, records: NDArray[np.int64]) -> None:
    """Let the keys of ``rows`` be found, which none were before."""
    size = len(slots)
    for place in range(len(rows)):
        mixed = _mixed(records[2 * rows[place]])
        at = _home(mixed, size)
        while slots[at] != 0:
            at = at + 1 if at + 1 < size else 0
        slots[at] = rows[place] | _mark(mixed, bits) << bits


@compiled
def remove(rows: NDArray[np.int64], slots: NDArray[np.uint32], bits: int, records: NDArray[np.int64]) -> None:
    """Let the keys of ``rows`` not be found any more; ``records`` must still have them."""
    size, mask = len(slots), (1 << bits) - 1
    for place in range(len(rows)):
        hole = _home(_mixed(records[2 * rows[place]]), size)
        while np.int64(slots[hole]) & mask != rows[place]:
            hole = hole + 1 if hole + 1 < size else 0
        at = hole
        while True:
            at = at + 1 if at + 1 < size else 0
            slot = np.int64(slots[at])
            if slot == 0:
                break
            home = _home(_mixed(records[2 * (slot & mask)]), size)
            if (at - home) % size >= (at - hole) % size:
                slots[hole] = slot
                hole = at
        slots[hole] = 0


def _score(state: int, by_times: bool) -> int:
    """What is lowest goes first: times and then the last batch, or the last batch alone."""
    return state if by_times else state & _SEEN


def _up_to(score: int, row: int, bound_score: int, bound_row: int) -> bool:
    """Whether a row goes before another one, or is the same: in the order of scores, then of rows."""
    return score < bound_score or (score == bound_score and row <= bound_row)


def _sift_down(scores: NDArray[np.int64], rows: NDArray[np.int64], size: int, at: int) -> None:
    score, row = scores[at], rows[at]
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        other = child + 1
        if other < size and not _up_to(scores[child], rows[child], scores[other], rows[other]):
            child = other
        if _up_to(score, row, scores[child], rows[child]):
            break
        scores[at], rows[at] = scores[child], rows[child]
        at = child
    scores[at], rows[at] = score, row


def _sift_up(scores: NDArray[np.int64], rows: NDArray[np.int64], at: int) -> None:
    score, row = scores[at], rows[at]
    while at > 0:
        parent = (at - 1) // 2
        if _up_to(scores[parent], rows[parent], score, row):
            break
        scores[at], rows[at] = scores[parent], rows[parent]
        at = parent
    scores[at], rows[at] = score, row


@compiled
def count_up_to(
    records: NDArray[np.int64], used: int, by_times: bool, bound_score: int, bound_row: int
) -> int:
    """How many of the first ``used`` rows are not above the bound, a score and a row."""
    count = 0
    for row in range(FIRST_ROW, used):
        score = _score(records[2 * row + 1], by_times)
        count += _up_to(score, row, bound_score, bound_row)
    return count


@compiled
def gather(
    records: NDArray[np.int64],
    used: int,
    by_times: bool,
    bound_score: int,
    bound_row: int,
    scores: NDArray[np.int64],
    rows: NDArray[np.int64],
) -> int:
    """Fill the heap ``scores`` and ``rows`` with the rows that are not above the bound; how many these
    are."""
    size = 0
    for row in range(FIRST_ROW, used):
        score = _score(records[2 * row + 1], by_times)
        if _up_to(score, row, bound_score, bound_row):
            scores[size], rows[size] = score, row
            size += 1
    for at in range(size // 2 - 1, -1, -1):
        _sift_down(scores, rows, size, at)
    return size


@compiled
def push(
    new: NDArray[np.int64],
    records: NDArray[np.int64],
    by_times: bool,
    bound_score: int,
    bound_row: int,
    scores: NDArray[np.int64],
    rows: NDArray[np.int64],
    size: int,
) -> int:
    """Put those of the rows ``new`` that are not above the bound into the heap, of ``size`` rows so far; the
    size then, or -1 if there is no room."""
    for place in range(len(new)):
        row = new[place]
        score = _score(records[2 * row + 1], by_times)
        if _up_to(score, row, bound_score, bound_row):
            if size == len(scores):
                return -1
            scores[size], rows[size] = score, row
            size += 1
            _sift_up(scores, rows, size - 1)
    return size


@compiled
def take(
    records: NDArray[np.int64],
    by_times: bool,
    bound_score: int,
    bound_row: int,
    scores: NDArray[np.int64],
    rows: NDArray[np.int64],
    sizes: NDArray[np.int64],
    now: int,
    latest: int,
    taken: NDArray[np.int64],
    states: NDArray[np.int64],
) -> int:
    """Take the lowest rows from the heap that were last seen in batch ``latest`` or before, and not in the
    batch ``now``: into ``taken`` with their ``states``, as many as there is room for. They count as seen
    ``now``. ``sizes``: how many rows the heap has, and whether it was left because of ``latest``. Returns how
    many were taken."""
    found, aside, size = 0, 0, sizes[0]
    kept_scores, kept_rows = np.empty(size, np.int64), np.empty(size, np.int64)
    while found < len(taken) and size > 0:
        row = rows[0]
        state = records[2 * row + 1]
        score = _score(state, by_times)
        within = _up_to(score, row, bound_score, bound_row)
        if score != scores[0] and within:  # seen since: it waits at its new place
            scores[0] = score
            _sift_down(scores, rows, size, 0)
            continue
        seen = state & _SEEN
        if within and seen != now and seen > latest:
            sizes[1] = 1
            break
        size -= 1
        scores[0], rows[0] = scores[size], rows[size]
        if size > 0:
            _sift_down(scores, rows, size, 0)
        if not within:
            continue
        if seen == now:
            kept_scores[aside], kept_rows[aside] = score, row
            aside += 1
            continue
        taken[found], states[found] = row, state
        records[2 * row + 1] = (state >> SEEN_BITS << SEEN_BITS) | now
        found += 1
    for place in range(aside):
        scores[size], rows[size] = kept_scores[place], kept_rows[place]
        size += 1
        _sift_up(scores, rows, size - 1)
    sizes[0] = size
    return found


@compiled
def uniform(keys: NDArray[np.int64], seed: int, width: int, values: NDArray[np.float32]) -> None:
    """Numbers in [-1, 1) of the ids ``keys`` [n] into ``values`` [n * width]: of ``seed``, key and column
    alone."""
    for place in range(len(keys)):
        stream = _mixed(np.uint64(keys[place]) ^ _mixed(seed))
        for column in range(width):
            stream += np.uint64(0x9E3779B97F4A7C15)
            unit = np.float64(_mixed(stream) >> np.uint64(40)) / 8388608.0
            values[place * width + column] = np.float32(unit - 1.0)
