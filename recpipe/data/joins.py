"""Joins: the columns of side tables in memory, such as attributes of items, beside the records of files."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from recpipe.data.derivations import Join
from recpipe.data.features import Feature
from recpipe.data.records import InputFile, input_files, require_columns
from recpipe.data.text import Block
from recpipe.data.values import alike, is_text, plain, plain_type, read_ids, require_type, value_at
from recpipe.errors import DataError, shown

log = logging.getLogger(__name__)

MOST_BYTES = 1 << 30
"""Of a side table's columns in memory, as Arrow has them."""


class SideTable:
    """A side table in memory, in which each key has one row. ``names``: its columns as records get them.

    ``DataError`` if it does not fit, or has a key twice. ``key``: the type of the records' key.
    """

    def __init__(self, join: Join, key: pa.DataType) -> None:
        self.left = join.left
        files = input_files(join.path)
        self.is_text = files[0].format == "csv"
        own = list(join.columns) or [name for name in files[0].columns.names if name != join.right]
        kind = _shared_type(files, join.right)
        self._as_text = is_text(plain_type(key))
        both = self._as_text and is_text(plain_type(kind))
        self._key = Feature(join.right, type="text" if both else "integer")
        require_type(str(files[0]), join.right, kind, self._key)
        kinds = [_shared_type(files, name) for name in own]
        self.fields = [pa.field(join.prefix + name, kind) for name, kind in zip(own, kinds, strict=True)]
        self.names = [field.name for field in self.fields]
        rows = _in_memory(files, [join.right, *own], f"data.joins, {shown(join.path)}")
        self._rows = pa.record_batch(rows.columns, [join.left, *self.names])
        found = read_ids(rows.column(0), self._key)
        there = np.flatnonzero(found.valid & ~found.missing)
        order = np.argsort(found.keys[there], kind="stable")
        self._keys, self._places = found.keys[there][order], there[order]
        again = np.flatnonzero(self._keys[1:] == self._keys[:-1])
        if len(again):
            twice = value_at(rows.column(0), int(self._places[again[0]]))
            raise DataError(
                f"{files[0]}, column {shown(join.right)}: {shown(twice)} is in two rows, and a join needs "
                "one for each key; leave the others out of the side table"
            )
        log.info("joining %s by %s: %s keys", shown(join.path, 200), self.left, f"{len(self._keys):,}")

    def rows(self) -> pa.RecordBatch:
        """All rows that have a key, with this under the name and in the kind, text or numbers, that it has in
        the records."""
        order = np.argsort(self._places)
        rows, keys = self._rows.take(pa.array(self._places[order])), pa.array(self._keys[order])
        if not (self._as_text and is_text(rows.column(0).type)):
            rows = rows.set_column(0, self.left, keys.cast(pa.string()) if self._as_text else keys)
        return rows

    def beside(self, keys: pa.Array) -> dict[str, pa.Array]:
        """Its columns for records with these ``keys`` [n]; null where it lacks one."""
        found = read_ids(keys, self._key)
        matched = found.valid & ~found.missing
        rows = np.zeros(len(matched), np.int64)
        if len(self._keys):
            at = np.minimum(np.searchsorted(self._keys, found.keys), len(self._keys) - 1)
            matched, rows = matched & (self._keys[at] == found.keys), self._places[at]
        else:
            matched = np.zeros_like(matched)
        places = pa.array(rows, mask=~matched)
        return {name: self._rows.column(at).take(places) for at, name in enumerate(self.names, 1)}


def _shared_type(files: Sequence[InputFile], name: str) -> pa.DataType:
    """The plain type of a column that all ``files`` have, of the first one with values; ``DataError`` where a
    file lacks it or holds something else."""
    shared, where = pa.null(), files[0]
    for file in files:
        require_columns(file, [name])
        kind = plain_type(file.columns.field(name).type)
        if not alike(kind, shared):
            raise DataError(f"{file}, column {shown(name)}: holds {kind} here and {shared} in {where}")
        if pa.types.is_null(shared):
            shared, where = kind, file
    return shared


def _in_memory(files: Sequence[InputFile], names: Sequence[str], what: str) -> pa.RecordBatch:
    """All rows with these columns, plain; ``DataError`` beyond ``MOST_BYTES``."""
    tables, size = [], 0
    for file in files:
        for block in file.blocks(list(dict.fromkeys(names))):
            table = pa.table([plain(block.rows[name]) for name in names], [str(n) for n in range(len(names))])
            size += table.nbytes
            if size > MOST_BYTES:
                raise DataError(
                    f"{what}: takes more than {MOST_BYTES:,} bytes in memory, the most of a side table; name "
                    "fewer of its columns (columns: [...]), or join it beforehand"
                )
            tables.append(table)
    if not size:
        raise DataError(f"{what}: has no rows to join")
    try:
        return pa.concat_tables(tables, promote_options="permissive").combine_chunks().to_batches()[0]
    except pa.ArrowException as error:
        raise DataError(
            f"{what}: its files have columns of several types ({shown(error, 200)}); write the same in all"
        ) from error


@dataclass(frozen=True)
class JoinedFile(InputFile):
    """A file whose records have the columns of side tables beside their own."""

    sides: tuple[SideTable, ...] = ()

    @cached_property
    def file(self) -> InputFile:
        """The file without them."""
        return InputFile(self.path, self.format, self.partition, self.rules)

    @cached_property
    def columns(self) -> pa.Schema:
        """Names and types of all columns; ``DataError`` if a side table has a column that is there."""
        found = self.file.columns
        for side in self.sides:
            for own in side.fields:
                if own.name in found.names:
                    raise DataError(
                        f"{self}: a join would add a second column '{shown(own.name)}'; give it a prefix, or "
                        "name other columns of the side table"
                    )
                found = found.append(own)
        return found

    def is_all_text(self, column: str) -> bool:
        """Of a side table's columns, as of its files."""
        of = [side for side in self.sides if column in side.names]
        return of[0].is_text if of else self.file.is_all_text(column)

    def blocks(self, columns: Sequence[str], start: int = 0, groups: range | None = None) -> Iterator[Block]:
        """Its rows with these ``columns``, those of side tables looked up."""
        require_columns(self, columns)
        wanted, used = set(columns), list[SideTable]()
        for side in reversed(self.sides):
            if wanted & set(side.names):
                used.insert(0, side)
                wanted.add(side.left)  # which a table before it may have brought
        own = [name for name in self.file.columns.names if name in wanted]
        for first, rows, share, left_out in self.file.blocks(own, start, groups):
            found = {name: rows[name] for name in own}
            for side in used:
                found |= side.beside(found[side.left])
            joined = pa.record_batch([found[name] for name in columns], list(columns))
            yield Block(first, joined, share, left_out)


def joined(files: Sequence[InputFile], joins: Sequence[Join]) -> list[InputFile]:
    """``files`` with the columns of all side tables. A join's key may be a column that one before it adds.
    ``DataError`` for a table that cannot be joined."""
    found = list(files)
    sides: list[SideTable] = []
    for join in joins:
        kind = _shared_type(found, join.left)
        require_type(str(found[0]), join.left, kind, Feature(join.left))
        sides.append(SideTable(join, kind))
        found = [JoinedFile(f.path, f.format, f.partition, f.rules, tuple(sides)) for f in files]
    return found


def contents(joins: Sequence[Join]) -> list[dict[str, Any]]:
    """What samples depend on of the ``joins``: their keys, and a hash of each side table's bytes."""
    return [asdict(join) | {"digests": [_digest(file) for file in input_files(join.path)]} for join in joins]


def _digest(file: InputFile) -> str:
    with file.path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
