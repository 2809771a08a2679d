"""The records of a broker's messages: a JSON object each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.json

from recpipe.data.json_lines import as_text
from recpipe.data.stream.chunks import Chunk, Offset
from recpipe.data.text import READ_FAULTS
from recpipe.errors import BadRow, shown


class Message(NamedTuple):
    """What a record was sent as, None: nothing; the offset of the next one in its partition; and what it is
    called in messages to the user."""

    content: bytes | None
    after: Offset
    name: str


def chunks_of(
    messages: Sequence[Message], partition: str, columns: Sequence[str], skip: bool
) -> Iterator[Chunk]:
    """The records of messages of one partition; a column that they lack is missing.

    ``BadRow`` for a message that is no JSON object, unless these are to be left out (``skip``).
    """
    rows = _parsed(messages, columns)
    if rows is not None:
        _, offsets, names = zip(*messages, strict=True)
        yield Chunk(names[0], partition, rows, offsets, 1, names=names)
    elif len(messages) > 1:  # halves, until the bad ones are alone
        half = len(messages) // 2
        yield from chunks_of(messages[:half], partition, columns, skip)
        yield from chunks_of(messages[half:], partition, columns, skip)
    elif not skip:
        raise BadRow(f"{messages[0].name}: {shown(messages[0].content or b'nothing')} is no JSON object")
    else:
        none = pa.record_batch([pa.nulls(0)] * len(columns), list(columns))
        yield Chunk(messages[0].name, partition, none, [], 1, rejected=1)


def _parsed(messages: Sequence[Message], columns: Sequence[str]) -> pa.RecordBatch | None:
    """The values of ``columns``; None if a message is not one JSON object, or if a column has values of
    several types."""
    contents = [(message.content or b"").strip() for message in messages]
    # None begins within another's object then, for there "}" is not followed by "{": as many objects as
    # messages are one of each.
    if not all(content[:1] == b"{" and content[-1:] == b"}" for content in contents):
        return None
    # A line's end in a message is between its words: within text it is escaped.
    text = b"\n".join(content.replace(b"\n", b" ") for content in contents)
    try:
        table = _read(text, {})
        if times := {f.name: as_text(f.type) for f in table.schema if as_text(f.type) != f.type}:
            table = _read(text, times)
    except READ_FAULTS:
        return None
    if len(table) != len(messages):
        return None
    arrays = [
        table[name].combine_chunks() if name in table.column_names else pa.nulls(len(table))
        for name in columns
    ]
    return pa.record_batch(arrays, list(columns))


def _read(text: bytes, types: Mapping[str, pa.DataType]) -> pa.Table:
    read = pa.json.ReadOptions(use_threads=False, block_size=len(text) + 1)
    return pa.json.read_json(
        pa.BufferReader(text), read, pa.json.ParseOptions(explicit_schema=pa.schema([*types.items()]))
    )
