"""Text as compiled loops read it, eight bytes at a time: records cut into columns, and whole numbers.

What they do not take is no fault: there is a way to read it that knows all there is.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from recpipe.common.loops import compiled, put_word, word

NEWLINE, RETURN = 10, 13
WORD = 8
"""Bytes that are looked at together."""
MOST_DIGITS = 16
"""Of whole numbers, two words. It is below the number of those that fit in 64 bits."""
_ONES, _HIGHEST, _ZERO = (np.uint64(n) for n in (0x0101010101010101, 0x8080808080808080, 0))
_PLACES = np.uint64(0x0001020304050607)
_ZEROS, _ABOVE_9 = np.uint64(0x3030303030303030), np.uint64(0x7676767676767676)
_BY_10, _BY_100, _BY_10000 = (np.uint64((10**n << 8 * n) + 1) for n in (1, 2, 4))
"""Makes of neighbours one digit, two digits and four digits long one number each."""
_PAIRS, _FOURS = np.uint64(0x00FF00FF00FF00FF), np.uint64(0x0000FFFF0000FFFF)


@compiled
def cut_records(
    data: Any, begin: int, places: Any, separator: int, quote: int, room: int, written: Any, ends: Any
) -> tuple[int, bool]:
    """How many records ``data`` uint8 has from ``begin`` on, and whether all that was read is ASCII; -1 rows
    if they are not written plainly. Its last byte is a newline.

    Column c goes to ``written`` uint8 from ``places[c] * room`` on, unless its place is below 0; the value of
    record r ends ``ends[places[c], r + 1]`` bytes behind that.
    """
    at, rows, columns, high = begin, 0, len(places), _ZERO
    to = np.empty(columns, np.int64)
    for column in range(columns):
        to[column] = places[column] * room
        if places[column] >= 0:
            ends[places[column], 0] = 0
    quotes, stops = np.uint64(quote & 255) * _ONES, np.uint64(separator) * _ONES
    newlines, returns = np.uint64(NEWLINE) * _ONES, np.uint64(RETURN) * _ONES
    while at < len(data):
        if data[at] == NEWLINE or data[at] == RETURN:
            return -1, True
        for column in range(columns):
            is_wanted, end = places[column] >= 0, to[column]
            is_quoted = data[at] == quote
            at += is_quoted
            while True:
                found = _word(data, at)
                if is_wanted:
                    put_word(written, end, found)
                    high |= found
                if is_quoted:
                    hits = _equal(found, quotes)
                else:
                    hits = _equal(found, stops) | _equal(found, newlines) | _equal(found, returns)
                if hits == _ZERO:
                    at += WORD
                    end += WORD
                    if at >= len(data):
                        return -1, True
                    continue
                before = _first(hits)
                at += before
                end += before
                if not is_quoted or data[at + 1] != quote:
                    break
                at += 2  # two quotes stand for one
                end += 1
            at += is_quoted
            if column < columns - 1:
                if data[at] != separator:
                    return -1, True
            else:
                at += data[at] == RETURN
                if data[at] != NEWLINE:
                    return -1, True
            at += 1
            if is_wanted:
                to[column] = end
                ends[places[column], rows + 1] = end - places[column] * room
        rows += 1
    return rows, (high & _HIGHEST) == _ZERO


def _word(data: Any, at: int) -> Any:
    """The bytes from ``at`` on; behind the last one there are zeros."""
    if at + WORD <= len(data):
        return word(data, at)
    found = _ZERO
    for place in range(len(data) - at):
        found |= np.uint64(data[at + place]) << np.uint64(8 * place)
    return found


def _equal(found: np.uint64, marks: np.uint64) -> Any:
    """The highest bit of the first byte that is the same in both, and perhaps bits of later ones; 0: of
    none."""
    differ = found ^ marks
    return (differ - _ONES) & ~differ & _HIGHEST


def _first(hits: np.uint64) -> Any:
    """The place of the byte that has the lowest of some highest bits."""
    lowest = (hits & (~hits + np.uint64(1))) >> np.uint64(7)
    return np.int64((lowest * _PLACES) >> np.uint64(56))


@compiled
def whole_numbers(data: Any, offsets: Any, numbers: Any) -> bool:
    """Write the numbers that text has between ``offsets`` [n + 1] of ``data`` uint8 into ``numbers`` int64
    [n]; False if some of it is none as ``WHOLE`` has it, or longer than ``MOST_DIGITS``."""
    for row in range(len(numbers)):
        begin, end = np.int64(offsets[row]), np.int64(offsets[row + 1])
        is_negative = begin < end and data[begin] == ord("-")
        begin += is_negative
        digits = end - begin
        if digits < 1 or digits > MOST_DIGITS or (data[begin] == ord("0") and (digits > 1 or is_negative)):
            return False
        last = _digits(data, max(begin, end - WORD), end)
        first = _digits(data, begin, end - WORD) if digits > WORD else _ZERO
        if ((first + _ABOVE_9) | (last + _ABOVE_9) | first | last) & _HIGHEST != _ZERO:
            return False
        number = np.int64(_number(first)) * 100000000 + np.int64(_number(last))
        numbers[row] = -number if is_negative else number
    return True


def _digits(data: Any, begin: Any, end: Any) -> Any:
    """The digits of up to a word, behind zeros for those that it lacks: each what it is above ``0``, other
    bytes more than 9."""
    lacks = np.uint64(8 * (WORD - (end - begin)))
    return (_word(data, begin) ^ _ZEROS) << lacks


def _number(digits: np.uint64) -> Any:
    pairs = (digits * _BY_10) >> np.uint64(8)
    fours = ((pairs & _PAIRS) * _BY_100) >> np.uint64(16)
    return ((fours & _FOURS) * _BY_10000) >> np.uint64(32)
