"""A bounded sample of files: rows of their first, middle and last parts, as far as a format allows it.

Parquet is read by row groups, Arrow files by batches, plain text from a byte on. Packed text and Arrow
streams can only be read from their beginning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from math import ceil

import pyarrow as pa
import pyarrow.parquet as pq

from recpipe.data.column_types import alike, plain
from recpipe.data.records import InputFile, require_columns
from recpipe.data.remote import opened, size_of
from recpipe.data.text import PACKED, READ_FAULTS
from recpipe.errors import DataError, shown

PARTS = 9
"""Places at which rows are read, over all files."""
WHERE = ("first", "middle", "last")
PLACES = (0.0, 0.5, 1.0)
MOST_BYTES = 256 << 20
"""Of a sample, as its format keeps it."""
LONGEST_GROUP = 1 << 22
"""Rows of a row group that is read up to its middle; of longer ones the beginning is taken."""


@dataclass(frozen=True)
class Sample:
    """``rows``: the columns that all files have, plain (``recpipe.data.column_types.plain``). ``total``: the
    rows of all files, an estimate unless the sample is ``whole``, all of them. ``lacking``: columns that a
    file lacks, with it. ``says``: what was read, for the reader. ``left_out``: events without a session or a
    time, of which there are no samples."""

    rows: pa.Table
    total: int
    whole: bool
    lacking: dict[str, InputFile]
    says: str
    left_out: int = 0


@dataclass
class _Part:
    """What was read of a file: record batches, its rows in all, and whether they are all here."""

    batches: list[pa.RecordBatch]
    total: int
    whole: bool
    places: Sequence[float] = (0.0,)


def take_sample(files: Sequence[InputFile], rows: int) -> Sample:
    """At most about ``rows`` rows of ``files``. ``DataError`` for a damaged file, and for a column that is
    text in one and numbers in another."""
    spread = sorted({n * (len(files) - 1) // (PARTS - 1) for n in range(PARTS)})
    chosen = [files[n] for n in spread]
    names, lacking = shared(chosen)
    each = max(1, rows // len(chosen))
    # All three places of each file; of many files the beginning of the first, the middle of the next one ...
    places = [PLACES] if 3 * len(chosen) <= PARTS else [(place,) for place in PLACES]
    parts = [_part(file, names, each, where) for file, where in zip(chosen, cycle(places), strict=False)]
    tables = [as_plain(batch) for part in parts for batch in part.batches]
    if not any(table.num_rows for table in tables):
        raise DataError(f"{files[0]}: has no rows to look at")
    table = in_one(tables)
    whole = len(chosen) == len(files) and all(part.whole for part in parts)
    size = sum(size_of(file.path) for file in files)
    seen = sum(size_of(file.path) for file in chosen)
    total = table.num_rows if whole else ceil(sum(part.total for part in parts) * size / max(1, seen))
    return Sample(table, total, whole, lacking, _said(table.num_rows, total, whole, parts, len(files)))


def _said(rows: int, total: int, whole: bool, parts: Sequence[_Part], files: int) -> str:
    """How much was read, and from where."""
    if whole:
        return f"all {rows:,} rows" + (f" of {files} files" if files > 1 else "")
    places = sorted({place for part in parts for place in part.places})
    where = " and ".join(", ".join(WHERE[round(2 * place)] for place in places).rsplit(", ", 1))
    of = f"{len(parts)} of {files} files" if files > 1 else "the file"
    return f"{rows:,} of about {rounded(total):,} rows, from the {where} part of {of}"


def rounded(number: int) -> int:
    """To three digits, as an estimate is told."""
    return int(float(f"{number:.3g}"))


def shared(files: Sequence[InputFile]) -> tuple[list[str], dict[str, InputFile]]:
    """The columns of all ``files``, and those that one lacks, with it."""
    names = list(dict.fromkeys(name for file in files for name in file.columns.names))
    lacking: dict[str, InputFile] = {}
    kinds: dict[str, tuple[pa.DataType, InputFile]] = {}
    for name in names:
        for file in files:
            if name not in file.columns.names:
                lacking.setdefault(name, file)
                continue
            require_columns(file, [name])
            kind = file.columns.field(name).type
            other, where = kinds.setdefault(name, (kind, file))
            if not alike(kind, other):
                raise DataError(
                    f"{file}, column {shown(name)}: holds {kind} here and {other} in {where}; "
                    "write the same type in all files"
                )
            if pa.types.is_null(other):
                kinds[name] = kind, file
    return [name for name in names if name not in lacking], lacking


def _part(file: InputFile, names: list[str], rows: int, places: Sequence[float]) -> _Part:
    if file.format == "parquet":
        return _of_parquet(file, names, rows, places)
    if file.format == "arrow":
        return _of_arrow(file, names, rows, places)
    return _of_text(file, names, rows, places)


def _of_parquet(file: InputFile, names: list[str], rows: int, places: Sequence[float]) -> _Part:
    own = [name for name in names if name not in file.partition]
    try:
        parquet = pq.ParquetFile(opened(file.path, mapped=True), page_checksum_verification=True)
        total = parquet.metadata.num_rows
        groups = [parquet.metadata.row_group(n) for n in range(parquet.metadata.num_row_groups)]
        size = sum(group.total_byte_size for group in groups)
        rows = min(rows, max(len(places), MOST_BYTES // PARTS * len(places) * total // max(1, size)))
        wanted = _ranges(total, rows, places)
        found: list[pa.RecordBatch] = []
        first = 0
        for number, group in enumerate(groups):
            found += [
                file.with_partition(batch, names)
                for batch in _of_group(parquet, number, group.num_rows, first, wanted, own)
            ]
            first += group.num_rows
    except READ_FAULTS as error:
        raise DataError(f"{file}: damaged ({shown(error, 200)}); fetch the file again") from error
    return _Part(found, total, total <= rows, places)


def _ranges(total: int, rows: int, places: Sequence[float]) -> list[tuple[int, int]]:
    """Where ``rows`` of ``total`` rows begin and end, equally many at each of ``places``."""
    if total <= rows:
        return [(0, total)]
    each = rows // len(places)
    return [(low := int(place * (total - each)), low + each) for place in places]


def _of_group(
    parquet: pq.ParquetFile,
    number: int,
    size: int,
    first: int,
    wanted: Sequence[tuple[int, int]],
    names: Sequence[str],
) -> Iterator[pa.RecordBatch]:
    """What a row group, whose first row is ``first``, has of the ranges of rows ``wanted``."""
    inside = [(max(low - first, 0), min(high - first, size)) for low, high in wanted]
    inside = [(low, high) for low, high in inside if low < high]
    if size > LONGEST_GROUP:
        inside = [(0, sum(high - low for low, high in inside))]
    at = 0
    if not inside:
        return
    for batch in parquet.iter_batches(32768, row_groups=[number], columns=list(names), use_threads=False):
        for low, high in inside:
            begin, end = max(low - at, 0), min(high - at, len(batch))
            if begin < end:
                yield batch.slice(begin, end - begin)
        at += len(batch)
        if at >= inside[-1][1]:
            return


def _of_arrow(file: InputFile, names: list[str], rows: int, places: Sequence[float]) -> _Part:
    own = [name for name in names if name not in file.partition]
    try:
        with opened(file.path, mapped=True) as source:
            if source.read(6) != b"ARROW1":
                return _of_text(file, names, rows, places)
            whole = pa.ipc.open_file(source)
            count = whole.num_record_batches
            # Of few batches all, of more those at the places.
            few = count <= len(PLACES)
            numbers = range(count) if few else sorted({round(place * (count - 1)) for place in places})
            batches = [whole.get_batch(number) for number in numbers]
            for batch in batches:
                batch.validate(full=True)
            read = sum(len(batch) for batch in batches)
            if few:
                table = pa.Table.from_batches(batches, whole.schema).combine_chunks()
                cut = [table.slice(low, high - low) for low, high in _ranges(read, rows, places)]
                batches = [batch for part in cut for batch in part.to_batches()]
            else:
                batches = [batch.slice(0, rows // len(places)) for batch in batches]
            found = [file.with_partition(batch.select(own), names) for batch in batches]
    except READ_FAULTS as error:
        raise DataError(f"{file}: damaged ({shown(error, 200)}); fetch the file again") from error
    total = ceil(read * count / max(1, len(numbers)))
    return _Part(found, total, few and read <= rows, places)


def _of_text(file: InputFile, names: list[str], rows: int, places: Sequence[float]) -> _Part:
    """By blocks from the beginning, until there are enough; of a long plain file by parts of as many rows."""
    found: list[pa.RecordBatch] = []
    size, count, total, read = size_of(file.path), 0, 0, 0
    seekable = file.path.suffix not in PACKED and file.format != "arrow"
    seekable = seekable and file.rules.encoding.lower().replace("_", "-") in ("utf-8", "utf8", "ascii")
    each = rows // len(places)
    for block in file.blocks(names):
        count += len(block.rows)
        read += block.rows.nbytes
        total = ceil(count / max(block.share, 1e-9))
        found.append(block.rows.slice(0, rows - count + len(block.rows)))
        if seekable and total > 1.2 * rows and count >= each:  # so that parts lie apart
            width = min(size, ceil(size * each / total))
            starts = [int(place * (size - width)) for place in places]
            parts = [_first(found, each) if not low else _from(file, names, low, each) for low in starts]
            return _Part([batch for part in parts for batch in part], total, False, places)
        if count > rows or read >= MOST_BYTES // PARTS:
            return _Part(found, max(total, count), False)
    return _Part(found, count, True)


def _from(file: InputFile, names: list[str], start: int, rows: int) -> list[pa.RecordBatch]:
    """The next rows after a byte; none where it is within a text of several lines, so that what follows is no
    row."""
    try:
        return _first((block.rows for block in file.blocks(names, start)), rows)
    except DataError:
        return []


def _first(batches: Iterable[pa.RecordBatch], rows: int) -> list[pa.RecordBatch]:
    """The first rows."""
    found: list[pa.RecordBatch] = []
    for batch in batches:
        found.append(batch.slice(0, rows))
        rows -= len(found[-1])
        if not rows:
            break
    return found


def as_plain(batch: pa.RecordBatch) -> pa.Table:
    """The same, its columns plain."""
    return pa.table([plain(column) for column in batch.columns], batch.schema.names)


def in_one(tables: Sequence[pa.Table]) -> pa.Table:
    """One table, each column in one piece; numbers of several widths become the widest."""
    try:
        joined = pa.concat_tables(tables, promote_options="permissive")
    except READ_FAULTS:  # types that say the same and that pyarrow does not promote: times of several zones
        first = tables[0].schema
        joined = pa.concat_tables([table.select(first.names).cast(first) for table in tables])
    return joined.combine_chunks()
