"""Records from JSON, an object a line, whose types may become known or wider after the first rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.json

from recpipe.data.text import READ_FAULTS, Block, text_blocks
from recpipe.errors import DataError, shown

if TYPE_CHECKING:
    from recpipe.data.records import InputFile

LOOKED_AT = 64
"""Blocks in which types are looked for, of columns that have no value before."""


class JsonLines:
    """JSON, an object a line. A column has the type of its first rows with a value; whole numbers become
    doubles from the block on in which one has a fraction."""

    @staticmethod
    def columns(file: InputFile) -> pa.Schema:
        kinds: dict[str, pa.DataType] = {}
        for text, _ in islice(text_blocks(file), LOOKED_AT):
            for own in JsonLines.schema(file, bytes(text)):
                if _is_open(kinds.setdefault(own.name, own.type)):
                    kinds[own.name] = own.type
            if not any(map(_is_open, kinds.values())):
                break
        if not kinds:
            raise DataError(f"{file}: the file is empty")
        return pa.schema(list(kinds.items()))

    @staticmethod
    def schema(file: InputFile, text: bytes) -> pa.Schema:
        """The types in a block."""
        if text.isspace():
            return pa.schema([])
        try:
            found = pa.json.read_json(
                pa.BufferReader(text), pa.json.ReadOptions(block_size=len(text) + 1)
            ).schema
        except READ_FAULTS as error:
            raise _json_fault(file, error) from error
        return pa.schema([own.with_type(as_text(own.type)) for own in found])

    @staticmethod
    def blocks(file: InputFile, columns: Sequence[str], start: int = 0) -> Iterator[Block]:
        known, row = file.columns, 0
        wanted = pa.schema([known.field(name) for name in columns])
        for block, share in text_blocks(file, start=start):
            text = bytes(block)
            if text.isspace():
                continue
            try:
                table = _parsed_json(text, wanted)
            except READ_FAULTS:
                wanted = _with_fractions(wanted, JsonLines.schema(file, text))
                try:
                    table = _parsed_json(text, wanted)
                except READ_FAULTS as error:
                    raise _json_fault(file, error) from error
            for batch in table.combine_chunks().to_batches():
                yield Block(row + 1, batch.select(list(columns)), share)
                row += len(batch)


def _parsed_json(text: bytes, wanted: pa.Schema) -> pa.Table:
    read = pa.json.ReadOptions(block_size=len(text) + 1)
    parse = pa.json.ParseOptions(explicit_schema=wanted, unexpected_field_behavior="ignore")
    return pa.json.read_json(pa.BufferReader(text), read, parse)


def as_text(kind: pa.DataType) -> pa.DataType:
    """``kind`` with text in the place of times, which pyarrow takes text for that is written like them."""
    if pa.types.is_list(kind):
        return pa.list_(as_text(kind.value_type))
    return pa.string() if pa.types.is_timestamp(kind) else kind


def _is_open(kind: pa.DataType) -> bool:
    """Whether a type says nothing, for there was no value."""
    return bool(pa.types.is_null(kind) or (pa.types.is_list(kind) and _is_open(kind.value_type)))


def _with_fractions(wanted: pa.Schema, found: pa.Schema) -> pa.Schema:
    """``wanted`` with doubles where it has whole numbers, and ``found`` fractions."""
    fields = []
    for own in wanted:
        place = found.get_field_index(own.name)
        widens = place >= 0 and own.type == pa.int64() and found.field(place).type == pa.float64()
        fields.append(own.with_type(pa.float64()) if widens else own)
    return pa.schema(fields)


def _json_fault(file: InputFile, error: BaseException) -> DataError:
    """What is wrong in lines of JSON, which are read from the beginning: one that is no object, or a value of
    another kind than its column has in an earlier row."""
    seen: dict[str, tuple[str, int]] = {}
    row = 0
    for text, _ in text_blocks(file):
        for line in filter(bytes.strip, bytes(text).splitlines()):
            row += 1
            try:
                content = json.loads(line)
            except ValueError:
                content = None
            if not isinstance(content, dict):
                return DataError(f"{file}, row {row}: '{shown(line)}' is not an object of JSON in one line")
            for name, value in content.items():
                if (kind := _kind_of(value)) is None:
                    continue
                then, first = seen.setdefault(name, (kind, row))
                if kind != then:
                    return DataError(
                        f"{file}, row {row}, column {shown(name)}: {shown(value)} is {kind}, and row {first} "
                        f"has {then}; write the same in all rows"
                    )
    return DataError(f"{file}: not JSON, an object a line ({shown(error, 200)})")


def _kind_of(value: object) -> str | None:
    """What a value of JSON is, in words; None: nothing can be told of it."""
    if isinstance(value, list):
        kinds = {kind for each in value if (kind := _kind_of(each))}
        return f"a list ({' and '.join(sorted(kinds))})" if kinds else None
    words: dict[type[object], str] = {bool: "a boolean", int: "a number", float: "a number", str: "text"}
    return "an object" if isinstance(value, dict) else words.get(type(value))
