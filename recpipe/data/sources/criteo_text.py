"""Parses blocks of Criteo text into columns, and says what is wrong with a row that cannot be parsed."""

from __future__ import annotations

import re
from math import isfinite

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from numpy.typing import NDArray

from recpipe.data.columns import Columns, Float32, Ids, bits_of
from recpipe.data.sources.criteo_columns import COLUMNS, DENSE, SPARSE
from recpipe.data.sources.transforms import signed_log
from recpipe.errors import shown

# There is only one way to match, so nothing backtracks.
_NUMBER = rb"-?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
_HEX = rb"[0-9a-fA-F]{1,16}"
_PLAIN = b"0123456789abcdefABCDEF.-\t\n"
_ROW = re.compile(rb"[01](?:\t(?:%s)?){13}(?:\t(?:%s)?){26}\r?" % (_NUMBER, _HEX))
_PARSE = pa.csv.ParseOptions(delimiter="\t", quote_char=False, ignore_empty_lines=False)
_CONVERT = pa.csv.ConvertOptions(
    column_types={name: pa.float64() if name in DENSE else pa.binary() for name in COLUMNS},
    null_values=[""],
    strings_can_be_null=False,
    check_utf8=False,
)


class Malformed(Exception):
    """The quick parser met a row that may break the format; ``bad_lines`` says which one does."""


def parse_plain(text: bytes) -> Columns:
    """Columns of whole lines of Criteo text; ``Malformed`` if any of them may break the format.

    pyarrow accepts more than the format does, depending on its release: numbers with spaces around them, a
    plus sign or a byte order mark, and a lone CR as the end of a line. Rows with such bytes are left to
    ``bad_lines``, so that whether a row is bad does not depend on the rows around it.
    """
    if b"\r" in text:
        text = text.replace(b"\r\n", b"\n")
    if text.translate(None, _PLAIN):
        raise Malformed("a byte that few numbers and ids have")
    return parse_block(text)


def parse_block(text: bytes) -> Columns:
    """Columns of whole lines of Criteo text, with ids uint32, or uint64 if one of them takes more.

    None of the lines may be bad by ``bad_lines``.
    """
    if not text:
        return Columns(np.empty(0, np.float32), np.empty((0, 13), np.float32), np.empty((0, 26), np.uint32))
    whole = pa.csv.ReadOptions(column_names=COLUMNS, block_size=len(text))
    try:
        table = pa.csv.read_csv(pa.BufferReader(text), whole, _PARSE, _CONVERT).combine_chunks()
    except pa.ArrowInvalid as error:
        raise Malformed(str(error).splitlines()[0]) from error
    arrays = [column.chunk(0) for column in table.columns]
    dense = np.empty((len(table), len(DENSE)), np.float32)
    for index, array in enumerate(arrays[1:14]):
        dense[:, index] = _signed_log(array)
    keys = [_hex_keys(array) for array in arrays[14:]]
    ids = np.stack([own for own, _ in keys]).T  # by feature in memory, as their rows are made
    missing = np.stack([absent for _, absent in keys], 1)
    return Columns(_labels(arrays[0]), dense, ids, missing=bits_of(missing))


def _signed_log(array: pa.Array) -> Float32:
    values = pc.fill_null(array, 0.0).to_numpy(zero_copy_only=False)
    if not np.isfinite(values).all():
        raise Malformed("a dense value is not a finite number")
    return signed_log(values)


def _labels(array: pa.Array) -> Float32:
    lengths, data = _text(array)
    if not (lengths == 1).all() or not ((data == ord("0")) | (data == ord("1"))).all():
        raise Malformed("a label is not 0 or 1")
    return (data - ord("0")).astype(np.float32)


def _text(array: pa.Array) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """Lengths and joined bytes of a binary array without nulls."""
    _, offsets_buffer, data_buffer = array.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int32)[array.offset : array.offset + len(array) + 1]
    if data_buffer is None:
        return np.diff(offsets), np.empty(0, np.uint8)
    return np.diff(offsets), np.frombuffer(data_buffer, np.uint8)[offsets[0] : offsets[-1]]


def _hex_keys(array: pa.Array) -> tuple[Ids, NDArray[np.bool_]]:
    """Hexadecimal ids of up to 16 digits, uint32 if they have no more than 8; and which of them are empty."""
    lengths, digits = _text(array)
    present = lengths > 0
    own = lengths[present]
    keys: Ids
    if (own == 8).all():
        keys = _hex_words(digits)
    else:
        if len(own) and own.max() > 16:
            raise Malformed("an id has more than 16 hexadecimal digits")
        padded = np.full((len(own), 16), ord("0"), np.uint8)
        padded[np.arange(16) >= 16 - own[:, None]] = digits
        words = _hex_words(padded.reshape(-1)).reshape(-1, 2)
        keys = words[:, 1]
        if words[:, 0].any():
            keys = (words[:, 0].astype(np.uint64) << np.uint64(32)) | keys
    if len(keys) == len(lengths):
        return keys, ~present
    result = np.zeros(len(lengths), keys.dtype)
    result[present] = keys
    return result, ~present


def _hex_words(digits: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Values of runs of 8 hexadecimal digits; a 64-bit word parses eight digits at a time. Of other bytes
    there may be points and minus signs, which alone have neither of two bits."""
    word = digits.view(">u8").astype(np.uint64)
    marks = (word >> np.uint64(4)) | (word >> np.uint64(6))
    marks &= np.uint64(0x0101010101010101)
    if not (marks == np.uint64(0x0101010101010101)).all():
        raise Malformed("an id is not hexadecimal")
    word = (word & np.uint64(0x0F0F0F0F0F0F0F0F)) + np.uint64(9) * (
        (word >> np.uint64(6)) & np.uint64(0x0101010101010101)
    )
    word = (word | (word >> np.uint64(4))) & np.uint64(0x00FF00FF00FF00FF)
    word = (word | (word >> np.uint64(8))) & np.uint64(0x0000FFFF0000FFFF)
    return (word | (word >> np.uint64(16))).astype(np.uint32)


def bad_lines(text: bytes) -> tuple[list[tuple[int, bytes]], bytes]:
    """Lines that break the format, with their indices from 0, and the text without them, ended by LF."""
    lines = text.split(b"\n")
    if not lines[-1]:
        lines.pop()
    bad, good = [], []
    for index, line in enumerate(lines):
        if _is_row(line):
            good.append(line.removesuffix(b"\r") + b"\n")
        else:
            bad.append((index, line))
    return bad, b"".join(good)


def _is_row(line: bytes) -> bool:
    return bool(_ROW.fullmatch(line)) and all(isfinite(float(x)) for x in line.split(b"\t")[1:14] if x)


def _is_number(value: bytes) -> bool:
    return bool(re.fullmatch(_NUMBER, value)) and isfinite(float(value))


def fault(line: bytes) -> str:
    """What is wrong with a bad line: its column, its value and what should stand there."""
    fields = line.removesuffix(b"\r").split(b"\t")
    if len(fields) != len(COLUMNS):
        hint = " (a test file without labels?)" if len(fields) == len(COLUMNS) - 1 else ""
        if line.startswith(b"PAR1"):
            hint = ", in a Parquet file, which data=parquet reads"
        return f"expected {len(COLUMNS)} tab-separated columns, found {len(fields)}{hint}"
    if fields[0] not in (b"0", b"1"):
        return f"column label: '{shown(fields[0])}' is neither 0 nor 1"
    for name, value in zip(DENSE, fields[1:14], strict=True):
        if value and not _is_number(value):
            return f"column {name}: '{shown(value)}' is not a finite number"
    for name, value in zip(SPARSE, fields[14:], strict=True):
        if value and not re.fullmatch(_HEX, value):
            return f"column {name}: '{shown(value)}' is not a hexadecimal id of up to 16 digits"
    raise AssertionError("a bad line has a bad field")
