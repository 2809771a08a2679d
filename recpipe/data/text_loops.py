"""Text with separators cut into columns by a compiled loop, a vector's bytes at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from recpipe.common.instructions import LINE, PART, lowest_bit, places_of, put_part
from recpipe.common.loops import compiled

NEWLINE, RETURN = 10, 13
_ZERO, _ONE, _NEWLINE, _RETURN = (np.uint64(number) for number in (0, 1, NEWLINE, RETURN))


@compiled
def cut_records(
    data: Any, begin: int, places: Any, separator: int, quote: int, room: int, written: Any, ends: Any
) -> tuple[int, bool]:
    """How many records ``data`` uint8 has from ``begin`` on, and whether all of it is ASCII; -1 rows if they
    are not written plainly. Its last byte is a newline.

    Column c goes to ``written`` uint8 from ``places[c] * room`` on, unless its place is below 0; the value of
    record r ends ``ends[places[c], r + 1]`` bytes behind that. Up to ``LINE`` bytes behind the last one are
    written, too.
    """
    rows, columns, size = 0, len(places), len(data)
    to = np.empty(columns, np.int64)
    for column in range(columns):
        to[column] = places[column] * room
        if places[column] >= 0:
            ends[places[column], 0] = 0
    comma, mark = np.uint64(separator), np.uint64(quote & 255)
    last = max(0, size - LINE)
    rest = np.zeros(2 * LINE, np.uint8)  # the last line, and behind it as many zeros
    rest[: size - last] = data[last:]
    # Stops are looked for a line at a time: ``stops`` are those from ``at`` on in the line that begins at
    # ``line``, so that one field need not wait for what is found of the one before.
    at = line = begin
    stops = _stops(data, rest, last, line, comma)
    while at < size:
        if data[at] == NEWLINE or data[at] == RETURN:
            return -1, True
        for column in range(columns):
            is_wanted, end = places[column] >= 0, to[column]
            if data[at] == quote:
                stop, end = _unquoted(data, rest, last, at + 1, mark, is_wanted, written, end)
                if stop < 0:
                    return -1, True
                line, stops = stop, _stops(data, rest, last, stop, comma)
            else:
                while stops == _ZERO:
                    line += LINE
                    if line >= size:
                        return -1, True
                    stops = _stops(data, rest, last, line, comma)
                stop = line + np.int64(lowest_bit(stops))
                if is_wanted:
                    _copy(data, rest, last, at, stop, written, end)
                    end += stop - at
            if column < columns - 1:
                if data[stop] != separator:
                    return -1, True
            elif data[stop] == RETURN:
                stop += 1
                line, stops = stop, _stops(data, rest, last, stop, comma)
            if column == columns - 1 and data[stop] != NEWLINE:
                return -1, True
            stops &= stops - _ONE
            at = stop + 1
            if is_wanted:
                to[column] = end
                ends[places[column], rows + 1] = end - places[column] * room
        rows += 1
    highest = np.uint8(0)
    for byte in data:
        highest |= byte
    return rows, bool(highest < 128)


def _stops(data: Any, rest: Any, last: Any, at: Any, comma: Any) -> Any:
    """Which of the ``LINE`` bytes from ``at`` on end a field that has no quotes around it. ``rest`` has those
    from ``last`` on, and zeros behind them."""
    if at < last:
        return places_of(comma, data, at) | places_of(_NEWLINE, data, at) | places_of(_RETURN, data, at)
    at -= last
    return places_of(comma, rest, at) | places_of(_NEWLINE, rest, at) | places_of(_RETURN, rest, at)


def _copy(data: Any, rest: Any, last: Any, at: Any, stop: Any, written: Any, end: Any) -> None:
    """Write the bytes from ``at`` to ``stop``, and perhaps some of those behind them."""
    while True:
        if at < last:
            put_part(written, end, data, at)
        else:
            put_part(written, end, rest, at - last)
        at += PART
        end += PART
        if at >= stop:
            return


def _unquoted(
    data: Any, rest: Any, last: Any, at: Any, mark: Any, is_wanted: Any, written: Any, end: Any
) -> Any:
    """Write the text that begins at ``at``, behind a quote: the place behind the next one, -1 if there is
    none, and where what is written ends. Two quotes stand for one."""
    while True:
        stop = at
        while True:
            hits = places_of(mark, data, stop) if stop < last else places_of(mark, rest, stop - last)
            if hits != _ZERO:
                break
            stop += LINE
            if stop >= len(data):
                return np.int64(-1), end
        stop += np.int64(lowest_bit(hits)) + 1
        if is_wanted:
            _copy(data, rest, last, at, stop, written, end)
        end += stop - at
        at = stop + 1
        if data[stop] != np.uint8(mark):
            return stop, end - 1
