"""Numbers that text has, read by compiled loops, eight digits at a time.

What they do not take is no fault: there is a way to read it that knows all there is.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from recpipe.common.instructions import LINE, leading_zeros, lowest_bit, places_of, upper_product, word
from recpipe.common.loops import compiled

WORD = 8
"""Digits that are read together."""
MOST_DIGITS = 16
"""Of whole numbers, two words. It is below the number of those that fit in 64 bits."""
MOST_POWER = 280
"""Powers of ten up to this one, and down to its inverse: with 19 digits, the number is within float64, and
not one of the smallest, which have fewer bits."""
MOST_EXACT = 27
"""Up to this power of ten, 5**power is within 64 bits."""
_HIGHEST, _ZERO, _ONE = (np.uint64(number) for number in (0x8080808080808080, 0, 1))
_ZEROS, _ABOVE_9 = np.uint64(0x3030303030303030), np.uint64(0x7676767676767676)
_BY_10, _BY_100, _BY_10000 = (np.uint64((10**n << 8 * n) + 1) for n in (1, 2, 4))
"""Makes of neighbours one digit, two digits and four digits long one number each."""
_PAIRS, _FOURS = np.uint64(0x00FF00FF00FF00FF), np.uint64(0x0000FFFF0000FFFF)
_TENS = np.array([10**digits for digits in range(WORD + 1)], np.uint64)
_ROOM = np.array([10 ** (19 - digits) for digits in range(19)], np.uint64)
"""Below this a number has room for so many digits more: all of up to 19 digits are within 64 bits."""
_WORD_OF_TENS = np.uint64(10**WORD)
_BEHIND = np.repeat(np.array([0, 255], np.uint8), 3 * WORD)
"""Three words from byte n on are a mask of the last n bytes of three words."""
_BYTE, _BYTES = np.uint64(8), np.uint64(56)
_POINT, _NONE = np.uint64(ord(".")), np.int64(1 << 32)
_BIAS, _FRACTION = 1023, 52
"""Of float64: what is added to its exponent, and the bits of its fraction."""
_UNSURE = np.uint64(2**64 - 2)


def _power(exponent: int) -> tuple[int, int, int]:
    """128 bits of 10**exponent, the highest of which is 1, rounded down, in two halves; and the power of two
    of that bit, plus 63 and the bias."""
    five = 5 ** abs(exponent)
    if exponent < 0:
        bits, power = (1 << 127 + five.bit_length()) // five, -five.bit_length()
    else:
        bits, power = (five << 128) >> five.bit_length(), five.bit_length() - 1
    return bits >> 64, bits % 2**64, power + exponent + 63 + _BIAS


_POWERS = np.array([_power(exponent) for exponent in range(-MOST_POWER, MOST_POWER + 1)], np.uint64)


@compiled
def whole_numbers(data: Any, offsets: Any, numbers: Any) -> bool:
    """Write the numbers that text has between ``offsets`` [n + 1] of ``data`` uint8 into ``numbers`` int64
    [n], 0 for empty text; False if some of it is none as ``WHOLE`` has it, or longer than ``MOST_DIGITS``."""
    for row in range(len(numbers)):
        begin, end = np.int64(offsets[row]), np.int64(offsets[row + 1])
        if begin == end:
            numbers[row] = 0
            continue
        is_negative = data[begin] == ord("-")
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


@compiled
def decimal_numbers(data: Any, offsets: Any, numbers: Any) -> bool:
    """Write the numbers that text has between ``offsets`` [n + 1] of ``data`` uint8 into ``numbers``, which
    has the bits of float64 [n] as uint64: the nearest ones, 0 for empty text. False if some of it is none as
    ``NUMBER`` has it, begins with ``+``, has more than 19 digits from the first that is not 0 on, is beyond
    ``MOST_POWER``, or is so near to the middle between two numbers of float64 that 128 bits of a power of ten
    do not tell.
    """
    for row in range(len(numbers)):
        begin, end = np.int64(offsets[row]), np.int64(offsets[row + 1])
        is_negative = begin < end and data[begin] == ord("-")
        begin += is_negative
        digits, exponent = _short(data, begin, end)
        if exponent > 0:
            digits, exponent = _long(data, begin, end)
        if abs(exponent) > MOST_POWER:
            if digits != _ZERO or exponent == _NONE:
                if begin == end and not is_negative:
                    numbers[row] = _ZERO
                    continue
                return False
            exponent = 0
        bits = _nearest(digits | np.uint64(digits == _ZERO), exponent)
        if bits == _ZERO:
            return False
        if digits == _ZERO:
            bits = _ZERO
        numbers[row] = bits | np.uint64(is_negative) << np.uint64(63)
    return True


def _short(data: Any, begin: Any, end: Any) -> Any:
    """The digits of up to three words without an exponent, as a number, and the power of ten that it is
    multiplied by, which is not above 0; else 1. No branch depends on where the point is."""
    size = end - begin
    if size > 3 * WORD or end < LINE:
        return _ZERO, np.int64(1)
    others = (_ONE << np.uint64(LINE - 1 - size) << _ONE) - _ONE  # of the line that ends there
    point = np.int64(lowest_bit(places_of(_POINT, data, end - LINE) & ~others))
    moved = 0 if point == LINE else point - (LINE - 3 * WORD) + 1  # bytes that are not behind the point
    at, own, kept = end - 3 * WORD, size, 3 * WORD - moved
    first = (word(data, at) ^ _ZEROS) & word(_BEHIND, own)
    second = (word(data, at + WORD) ^ _ZEROS) & word(_BEHIND, own + WORD)
    third = (word(data, at + 2 * WORD) ^ _ZEROS) & word(_BEHIND, own + 2 * WORD)
    third = _joined(third << _BYTE | second >> _BYTES, third, word(_BEHIND, kept + 2 * WORD))
    second = _joined(second << _BYTE | first >> _BYTES, second, word(_BEHIND, kept + WORD))
    first = _joined(first << _BYTE, first, word(_BEHIND, kept))
    odd = (first + _ABOVE_9) | (second + _ABOVE_9) | (third + _ABOVE_9) | first | second | third
    above = _number(first)
    if odd & _HIGHEST != _ZERO or above >= _ROOM[2 * WORD] or size <= (moved > 0):
        return _ZERO, np.int64(1)
    number = (above * _WORD_OF_TENS + _number(second)) * _WORD_OF_TENS + _number(third)
    return number, (moved - 3 * WORD if moved > 0 else np.int64(0))


def _joined(before: Any, behind: Any, mask: Any) -> Any:
    """A word with the bits of ``behind`` that the mask has, and the others of ``before``."""
    return (behind & mask) | (before & ~mask)


def _long(data: Any, at: Any, end: Any) -> Any:
    """The digits of any text that is a number, up to 19 of them, and the power of ten; else ``_NONE``."""
    begin = at
    at, digits = _run(data, at, end, _ZERO)
    count, exponent = at - begin, np.int64(0)
    if 0 <= at < end and data[at] == ord("."):
        behind, digits = _run(data, at + 1, end, digits)
        exponent = at + 1 - behind
        count, at = count - exponent, behind
    if at < 0 or count == 0:
        return _ZERO, _NONE
    if at < end:
        if data[at] | 32 != ord("e"):
            return _ZERO, _NONE
        at += 1
        is_inverse = at < end and data[at] == ord("-")
        at += at < end and (is_inverse or data[at] == ord("+"))
        behind, power = _run(data, at, end, _ZERO)
        if behind != end or behind == at or power > np.uint64(2 * MOST_POWER):
            return _ZERO, _NONE
        exponent += -np.int64(power) if is_inverse else np.int64(power)
    return digits, exponent


def _nearest(digits: Any, exponent: Any) -> Any:
    """The bits of the float64 next to ``digits`` * 10**``exponent``; 0 where that is not certain.

    The product of the digits, shifted up to 64 bits, and the 128 bits of the power is short by less than 2 of
    the last bits that are kept of it: by one, since lower ones are left out, and by one, since all those of
    the power are. Up to ``MOST_EXACT``, there are none of either.
    """
    row, shift = exponent + MOST_POWER, leading_zeros(digits)
    shifted = digits << shift
    upper, lower = upper_product(shifted, _POWERS[row, 0]), shifted * _POWERS[row, 0]
    middle = lower + upper_product(shifted, _POWERS[row, 1])
    upper += np.uint64(middle < lower)
    top = upper >> np.uint64(63)
    beyond = top + np.uint64(63 - _FRACTION - 1)
    rest, half = upper & ((_ONE << beyond) - _ONE), _ONE << (beyond - _ONE)
    up = np.uint64(rest >= half)
    if (rest == half and middle == _ZERO) or (rest == half - _ONE and middle >= _UNSURE):
        if not 0 <= exponent <= MOST_EXACT:
            return _ZERO
        up &= upper >> beyond  # in the middle, it is the even one
    # The fraction's own highest bit counts in the exponent, and so does rounding up to the next power of two.
    power = _POWERS[row, 2] + top - shift - _ONE
    return (power << np.uint64(_FRACTION)) + (upper >> beyond) + up


def _run(data: Any, at: Any, end: Any, digits: Any) -> Any:
    """Where the digits from ``at`` on end, at ``end`` if not before, and ``digits`` with these behind them;
    -1 if they have no room."""
    while at < end:
        found = _word(data, at) ^ _ZEROS
        others = ((found + _ABOVE_9) | found) & _HIGHEST
        count = min(end - at, np.int64(lowest_bit(others) >> np.uint64(3)))
        if count == 0:
            break
        if digits >= _ROOM[count]:
            return np.int64(-1), digits
        digits = digits * _TENS[count] + _number(found << np.uint64(8 * (WORD - count)))
        at += count
        if count < WORD:
            break
    return at, digits


def _word(data: Any, at: int) -> Any:
    """The bytes from ``at`` on; behind the last one there are zeros."""
    if at + WORD <= len(data):
        return word(data, at)
    found = _ZERO
    for place in range(len(data) - at):
        found |= np.uint64(data[at + place]) << np.uint64(8 * place)
    return found


def _digits(data: Any, begin: Any, end: Any) -> Any:
    """The digits of up to a word, behind zeros for those that it lacks: each what it is above ``0``, other
    bytes more than 9."""
    lacks = np.uint64(8 * (WORD - (end - begin)))
    return (_word(data, begin) ^ _ZEROS) << lacks


def _number(digits: np.uint64) -> Any:
    pairs = (digits * _BY_10) >> np.uint64(8)
    fours = ((pairs & _PAIRS) * _BY_100) >> np.uint64(16)
    return ((fours & _FOURS) * _BY_10000) >> np.uint64(32)
