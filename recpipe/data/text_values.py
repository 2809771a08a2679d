"""Text that has ids or numbers, read as these: by a compiled loop where all of an array is written plainly,
and by patterns, which know all there is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recpipe.common.loops import at_hand
from recpipe.data.column_types import is_bytes
from recpipe.data.columns import Int64
from recpipe.data.feature import NO_VALUE
from recpipe.data.number_loops import decimal_numbers, whole_numbers
from recpipe.data.sources.transforms import string_keys
from recpipe.data.text_columns import is_utf8
from recpipe.data.word_keys import WordKeys

Bools = NDArray[np.bool_]
WHOLE = r"^(0|-?[1-9][0-9]{0,17})$"
"""Whole numbers as ``type: integer`` takes them: in one way each, and within int64."""
NUMBER = r"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?$"
NAN = r"^[nN][aA][nN]$"
HEXADECIMAL = r"^[0-9a-fA-F]{1,16}$"
LONG = 1024
"""Values of an array from which on it is read by a loop, whose first call waits for its machine code."""
_WORD_KEYS = WordKeys()


@dataclass(frozen=True)
class TextReader:
    """Reads an array [n] of text, whose values that are missing become ``none``."""

    patterns: Callable[[pa.Array], tuple[NDArray[Any], Bools]]
    """The values of text without nulls, and which of it are valid."""
    loop: Callable[[pa.Array], NDArray[Any] | None] | None
    """The same where all of it is valid and written plainly, of empty text any; None where not."""
    none: float = 0

    def __call__(self, text: pa.Array, missing: Bools) -> tuple[NDArray[Any], Bools]:
        """Values [n], and which are valid."""
        if text.null_count or (own := self._quick(text)) is None:
            return self._of_present(text, missing)
        if missing.any():
            own[missing] = self.none
        return own, np.ones(len(text), bool)

    def _of_present(self, text: pa.Array, missing: Bools) -> tuple[NDArray[Any], Bools]:
        if not missing.any():
            return self.patterns(text)
        present = text.filter(pa.array(~missing))
        own, good = self._quick(present), np.ones(len(present), bool)
        if own is None:
            own, good = self.patterns(present)
        values, valid = np.full(len(text), self.none, own.dtype), np.ones(len(text), bool)
        values[~missing], valid[~missing] = own, good
        return values, valid

    def _quick(self, text: pa.Array) -> NDArray[Any] | None:
        if self.loop is None or len(text) < LONG or not at_hand():
            return None
        return self.loop(text)


def without_value(text: pa.Array, declared: tuple[str, ...]) -> Bools:
    """Where text is null, empty, or one of the ``declared`` values."""
    if declared:
        absent = pc.or_(pc.is_in(text, value_set=pa.array([*NO_VALUE, *declared], text.type)), text.is_null())
    elif not text.null_count:
        offsets = offsets_in(text)
        return np.asarray(offsets[1:] == offsets[:-1])
    else:
        absent = pc.equal(pc.binary_length(text), 0)
    return np.asarray(pc.fill_null(absent, True))


def offsets_in(text: pa.Array) -> NDArray[Any]:
    """Where in its buffer each of an array [n] of text begins, and where the last one ends, [n + 1]."""
    wide = pa.types.is_large_string(text.type) or pa.types.is_large_binary(text.type)
    if not len(text):  # which need not have a buffer
        return np.zeros(1, np.int64)
    whole = np.frombuffer(memoryview(text.buffers()[1]).toreadonly(), np.int64 if wide else np.int32)
    return whole[text.offset : text.offset + len(text) + 1]


def _bytes_in(text: pa.Array) -> NDArray[np.uint8]:
    """The buffer of an array of text."""
    buffer = text.buffers()[2]  # which empty text need not have
    return np.frombuffer(memoryview(buffer or b"").toreadonly(), np.uint8)


def _keys_by_loop(text: pa.Array) -> NDArray[Any] | None:
    keys, is_ascii = _WORD_KEYS(_bytes_in(text), offsets_in(text))
    return keys.view(np.int64) if is_ascii or is_bytes(text.type) or is_utf8(text) else None


def _keys(text: pa.Array) -> tuple[Int64, Bools]:
    """Keys of text, and which of it is UTF-8, unless it is bytes."""
    keys, valid = string_keys(text)
    return keys.view(np.int64), valid


def _whole_by_loop(text: pa.Array) -> NDArray[Any] | None:
    values = np.empty(len(text), np.int64)
    return values if whole_numbers(_bytes_in(text), offsets_in(text), values) else None


def _decimals_by_loop(text: pa.Array) -> NDArray[Any] | None:
    values = np.empty(len(text))
    plainly = decimal_numbers(_bytes_in(text), offsets_in(text), values.view(np.uint64))
    return values if plainly else None


def _whole_numbers(text: pa.Array) -> tuple[Int64, Bools]:
    """The numbers in an array [n] of text without nulls, 0 for what is not ``WHOLE``; and which of it is."""
    with suppress(pa.ArrowInvalid):
        values = np.asarray(text.cast(pa.int64()))
        if _is_shortest(text, values):
            return values, np.ones(len(text), bool)
    whole = np.asarray(pc.match_substring_regex(text, WHOLE))
    keys = np.zeros(len(text), np.int64)
    keys[whole] = np.asarray(text.filter(pa.array(whole)).cast(pa.int64()))
    return keys, whole


def _is_shortest(text: pa.Array, values: Int64) -> bool:
    """Whether each number is ``WHOLE`` as text has it: then all are as short as they can be, and have digits
    and signs alone, where pyarrow takes 007, -0 and 0x1F too. That is a tenth of the work of the pattern."""
    if not len(values):
        return True
    most = max(-int(values.min()), int(values.max()))
    if most >= 10**18:
        return False
    sizes = np.abs(values)
    digits = [10**power for power in range(1, 18) if 10**power <= most]
    least = len(values) + sum(np.count_nonzero(sizes >= first) for first in digits)
    offsets = offsets_in(text)
    written = _bytes_in(text)[offsets[0] : offsets[-1]]
    return len(written) == least + np.count_nonzero(values < 0) and bool(written.max() <= ord("9"))


def _hexadecimal_numbers(text: pa.Array) -> tuple[Int64, Bools]:
    """The same of hexadecimal digits; from 2**63 on wrapped."""
    encoded = text.dictionary_encode()
    good = np.asarray(pc.match_substring_regex(encoded.dictionary, HEXADECIMAL))
    keys = np.zeros(len(good), np.uint64)
    keys[good] = [int(word, 16) for word in encoded.dictionary.filter(pa.array(good)).to_pylist()]
    where = np.asarray(encoded.indices)
    return keys.view(np.int64)[where], good[where]


def _decimal_numbers(text: pa.Array) -> tuple[NDArray[np.float64], Bools]:
    """The same of ``NUMBER``, float64; infinite where it is too large, and NaN where it is written so."""
    with suppress(pa.ArrowInvalid):
        values = np.asarray(text.cast(pa.float64()))
        if np.isfinite(values).all():  # inf and nan(1) are numbers to pyarrow, too
            return values, np.ones(len(text), bool)
    good = np.asarray(pc.match_substring_regex(text, f"{NUMBER}|{NAN}"))
    values = np.zeros(len(text))
    # Python's float takes what pyarrow's cast does not: +7, 1e999 and 1e-999.
    values[good] = [float(number) for number in text.filter(pa.array(good)).to_pylist()]
    return values, good


KEYS = TextReader(_keys, _keys_by_loop)
"""Keys int64 of text, valid if it is UTF-8, as bytes need not be."""
WHOLE_NUMBERS = TextReader(_whole_numbers, _whole_by_loop)
"""int64 of what is ``WHOLE``."""
HEXADECIMAL_NUMBERS = TextReader(_hexadecimal_numbers, None)
"""int64 of what is ``HEXADECIMAL``; from 2**63 on wrapped."""
DECIMAL_NUMBERS = TextReader(_decimal_numbers, _decimals_by_loop, np.nan)
"""float64 of what is ``NUMBER`` or ``NAN``; infinite where it is too large."""
