"""Columns of text cut out of text with separators by a compiled loop.

It reads text that is written as the format has it, as pyarrow does, in a third of the time; of all other text
it makes nothing, and pyarrow says what that is.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recpipe.common.instructions import LINE
from recpipe.data.text_loops import NEWLINE, RETURN, cut_records

MOST_BYTES = 1 << 30
"""Of addresses for the columns of a block, each of which may have all of its text; few of them are used."""


class _Room(threading.local):
    """Memory that a thread cuts into, block after block: new memory takes as long as the work."""

    def __init__(self) -> None:
        self.written, self.ends = np.empty(0, np.uint8), np.empty(0, np.int32)

    def hold(self, written: int, ends: int) -> None:
        """Have room for so many elements."""
        if len(self.written) < written:
            self.written = np.empty(written, np.uint8)
        if len(self.ends) < ends:
            self.ends = np.empty(ends, np.int32)


class TextColumns:
    """Cuts the columns ``wanted`` out of text whose columns are called ``names``. Threads may share it."""

    def __init__(
        self, names: Sequence[str], wanted: Sequence[str], separator: str, quote: str | None
    ) -> None:
        self._wanted = list(wanted)
        self._places = np.array([wanted.index(name) if name in wanted else -1 for name in names])
        self._separator, self._quote = ord(separator), ord(quote) if quote else -1
        marks = {self._separator, self._quote, NEWLINE, RETURN}
        self._fits = max(marks) < 128 and len(marks) == 4
        self._own = _Room()

    def __call__(self, text: bytes | memoryview, header: bool) -> pa.Table | None:
        """The columns of whole records, after a first line if that is a ``header``; None unless they are
        written plainly, and if there are none."""
        data, count = np.frombuffer(text, np.uint8), len(self._wanted)
        begin = _after_header(data) if header else 0
        room, most = len(text) + LINE, len(text) // len(self._places)
        if begin is None or not self._fits or data[-1] != NEWLINE or not 0 < count * room <= MOST_BYTES:
            return None
        own = self._own
        own.hold(count * room, count * (most + 1))
        ends = own.ends[: count * (most + 1)].reshape(count, most + 1)
        marks = self._separator, self._quote
        rows, is_ascii = cut_records(data, begin, self._places, *marks, room, own.written, ends)
        if rows <= 0:
            return None
        arrays = [
            pa.StringArray.from_buffers(rows, _kept(each), _kept(own.written[place * room :][: each[-1]]))
            for place, each in enumerate(ends[:, : rows + 1])
        ]
        return pa.table(arrays, self._wanted) if is_ascii or all(map(is_utf8, arrays)) else None


def _kept(array: NDArray[Any]) -> pa.Buffer:
    """A copy in the memory that pyarrow has, and uses again."""
    buffer = pa.allocate_buffer(array.nbytes)
    np.frombuffer(buffer, array.dtype)[:] = array
    return buffer


def _after_header(data: NDArray[np.uint8]) -> int | None:
    """Where the second line begins; None if the first one is empty, or ends otherwise than others do."""
    line = data[: np.argmax(data == NEWLINE) + 1]
    lone = np.flatnonzero(line == RETURN)
    return None if len(line) < 3 or (len(lone) and lone[0] < len(line) - 2) else len(line)


def is_utf8(array: pa.Array) -> bool:
    """Whether all values of an array of text are what their type says."""
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True
