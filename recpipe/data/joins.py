"""Joins: the columns of side tables in memory, such as attributes of items, beside the records of files."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from recpipe.data.column_types import alike, is_text, plain, plain_type
from recpipe.data.columns import Int64
from recpipe.data.derivations import Join
from recpipe.data.feature import Feature
from recpipe.data.listing import input_files
from recpipe.data.records import InputFile, require_columns
from recpipe.data.refusals import require_type
from recpipe.data.text import Block, Made
from recpipe.data.values import read_ids, value_at
from recpipe.errors import DataError, shown

log = logging.getLogger(__name__)

MOST_BYTES = 1 << 30
"""Of a side table's columns in memory, as Arrow has them."""


class _Index(NamedTuple):
    """Where each key's row is: keys int64 [n] in ascending order, as ``feature`` reads them, and places."""

    feature: Feature
    keys: Int64
    places: Int64


class SideTable:
    """A side table in memory, in which each key has one row. ``names``: its columns as records get them.

    ``DataError`` if it does not fit.
    """

    def __init__(self, join: Join) -> None:
        self.left, self._right = join.left, join.right
        files = input_files(join.path, key="data.joins")
        self._where, self.is_text = str(files[0]), files[0].format == "csv"
        own = list(join.columns) or [name for name in files[0].columns.names if name != join.right]
        self._kind = _shared_type(files, join.right)
        kinds = [_shared_type(files, name) for name in own]
        self.fields = [pa.field(join.prefix + name, kind) for name, kind in zip(own, kinds, strict=True)]
        self.names = [field.name for field in self.fields]
        rows = _in_memory(files, [join.right, *own], f"data.joins, {shown(join.path)}")
        self._rows = pa.record_batch(rows.columns, [join.left, *self.names])
        self._indexes: dict[str, _Index] = {}
        log.info("joining %s by %s: %s rows", shown(join.path, 200), self.left, f"{len(self._rows):,}")

    def index(self, kind: pa.DataType) -> _Index:
        """That for keys of type ``kind`` in the records: as they are written where both sides are text, else
        whole numbers. ``DataError`` for a key that has two rows."""
        both = is_text(plain_type(kind)) and is_text(self._kind)
        feature = Feature(self._right, type="text" if both else "integer")
        if feature.type not in self._indexes:
            require_type(self._where, self._right, self._kind, feature)
            found = read_ids(self._rows.column(0), feature)
            there = np.flatnonzero(found.valid & ~found.missing)
            order = np.argsort(found.keys[there], kind="stable")
            keys, places = found.keys[there][order], there[order]
            again = np.flatnonzero(keys[1:] == keys[:-1])
            if len(again):
                twice = value_at(self._rows.column(0), int(places[again[0]]))
                raise DataError(
                    f"{self._where}, column {shown(self._right)}: {shown(twice)} is in two rows, and a join "
                    "needs one for each key; leave the others out of the side table"
                )
            self._indexes[feature.type] = _Index(feature, keys, places)
        return self._indexes[feature.type]

    def rows(self, kind: pa.DataType) -> pa.RecordBatch:
        """All rows that have a key, with this under the name that it has in the records, and as text or as
        numbers, as keys of type ``kind`` are."""
        index, as_text = self.index(kind), is_text(plain_type(kind))
        order = np.argsort(index.places)
        rows, keys = self._rows.take(pa.array(index.places[order])), pa.array(index.keys[order])
        if not (as_text and is_text(rows.column(0).type)):
            rows = rows.set_column(0, self.left, keys.cast(pa.string()) if as_text else keys)
        return rows

    def beside(self, keys: pa.Array) -> list[pa.Array]:
        """Its columns for records with these ``keys`` [n]; null where it lacks one."""
        if pa.types.is_null(plain_type(keys.type)):
            return [pa.nulls(len(keys), field.type) for field in self.fields]
        index = self.index(keys.type)
        found = read_ids(keys, index.feature)
        matched = found.valid & ~found.missing
        rows = np.zeros(len(matched), np.int64)
        if len(index.keys):
            at = np.minimum(np.searchsorted(index.keys, found.keys), len(index.keys) - 1)
            matched, rows = matched & (index.keys[at] == found.keys), index.places[at]
        else:
            matched = np.zeros_like(matched)
        places = pa.array(rows, mask=~matched)
        return [column.take(places) for column in self._rows.columns[1:]]


class Beside:
    """Records with ``columns``, of which some are those of side tables. ``own``: the columns of the records
    themselves that they are made of."""

    def __init__(self, sides: Sequence[SideTable], columns: Sequence[str]) -> None:
        self._columns, self._used = list(columns), list[SideTable]()
        wanted = dict.fromkeys(columns)
        for side in reversed(sides):
            if not wanted.keys().isdisjoint(side.names):
                self._used.insert(0, side)
                wanted[side.left] = None  # which a table before it may have brought
        added = {name for side in self._used for name in side.names}
        self.own = [name for name in wanted if name not in added]

    def __call__(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Of records with the columns ``own``."""
        found = {name: rows[name] for name in self.own}
        for side in self._used:
            found |= zip(side.names, side.beside(found[side.left]), strict=True)
        return pa.record_batch([found[name] for name in self._columns], self._columns)


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
        beside = Beside(self.sides, columns)
        for block in self.file.blocks(beside.own, start, groups):
            yield block._replace(rows=beside(block.rows))

    def each(
        self, columns: Sequence[str], make: Callable[[pa.RecordBatch], Made], groups: range | None = None
    ) -> Iterator[tuple[Block, Made]]:
        """As of ``InputFile``; rows are looked up in these threads, too."""
        require_columns(self, columns)
        beside = Beside(self.sides, columns)

        def both(rows: pa.RecordBatch) -> tuple[pa.RecordBatch, Made]:
            whole = beside(rows)
            return whole, make(whole)

        for block, (rows, made) in self.file.each(beside.own, both, groups):
            yield block._replace(rows=rows), made


def joined(files: Sequence[InputFile], joins: Sequence[Join]) -> list[InputFile]:
    """``files`` with the columns of all side tables. A join's key may be a column that one before it adds.
    ``DataError`` for a table that cannot be joined."""
    found = list(files)
    sides: list[SideTable] = []
    for join in joins:
        kind = _shared_type(found, join.left)
        require_type(str(found[0]), join.left, kind, Feature(join.left))
        sides.append(SideTable(join))
        sides[-1].index(kind)  # whose faults are told before records are read
        found = [JoinedFile(f.path, f.format, f.partition, f.rules, tuple(sides)) for f in files]
    return found


def contents(joins: Sequence[Join]) -> list[dict[str, Any]]:
    """What samples depend on of the ``joins``: their keys, and a hash of each side table's bytes."""
    return [
        asdict(join) | {"digests": [_digest(file) for file in input_files(join.path, key="data.joins")]}
        for join in joins
    ]


def _digest(file: InputFile) -> str:
    with file.path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
