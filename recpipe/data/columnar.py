"""Records from files that have columns of types: Parquet, and Arrow's own format (Feather)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from recpipe.data.remote import opened
from recpipe.data.text import READ_FAULTS, Block
from recpipe.errors import DataError, shown

if TYPE_CHECKING:
    from recpipe.data.records import InputFile

BLOCK_ROWS = 32768
PART_ROWS = 1 << 20
"""Rows of a part of a Parquet file, about; its row groups are not cut."""


class Parquet:
    """Parquet, whose pages have checksums that are compared."""

    @staticmethod
    def open(file: InputFile) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(opened(file.path, mapped=True), page_checksum_verification=True)
        except READ_FAULTS as error:
            text = any(kind in {".csv", ".tsv", ".txt"} for kind in file.path.suffixes)
            remedy = "; text with separators is read by data.format=csv" if text else ""
            raise DataError(f"{file}: not a whole Parquet file ({shown(error, 200)}){remedy}") from error

    @staticmethod
    def columns(file: InputFile) -> pa.Schema:
        return Parquet.open(file).schema_arrow

    @staticmethod
    def parts(file: InputFile) -> list[range | None]:
        sizes = Parquet.sizes(Parquet.open(file))
        parts, begin, rows = [], 0, 0
        for group, size in enumerate(sizes, 1):
            rows += size
            if rows >= PART_ROWS or group == len(sizes):
                parts.append(range(begin, group))
                begin, rows = group, 0
        return [*parts] or [None]

    @staticmethod
    def sizes(parquet: pq.ParquetFile) -> list[int]:
        """The rows of each row group."""
        metadata = parquet.metadata
        return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]

    @staticmethod
    def blocks(file: InputFile, columns: Sequence[str], groups: range | None = None) -> Iterator[Block]:
        parquet, row = Parquet.open(file), 0
        rows = total = parquet.metadata.num_rows
        if groups is not None:
            sizes = Parquet.sizes(parquet)
            row, total = sum(sizes[: groups.start]), sum(sizes[: groups.stop])
        reader = parquet.iter_batches(
            BLOCK_ROWS, row_groups=groups and [*groups], columns=list(columns), use_threads=False
        )
        while True:
            try:
                batch = next(reader, None)
            except READ_FAULTS as error:
                raise _damaged(file, row, error) from error
            if batch is None:
                break
            yield Block(row + 1, batch, (row + len(batch)) / max(1, rows))
            row += len(batch)
        if row != total:
            raise DataError(f"{file}: damaged, {row} rows instead of {total}; fetch the file again")


class Arrow:
    """Arrow's own format (Feather): a file or a stream of record batches."""

    @staticmethod
    def open(file: InputFile) -> pa.RecordBatchReader:
        try:
            source = opened(file.path, mapped=True)
            if source.read(6) == b"ARROW1":
                whole = pa.ipc.open_file(source)
                batches = (whole.get_batch(n) for n in range(whole.num_record_batches))
                return pa.RecordBatchReader.from_batches(whole.schema, batches)
            source.seek(0)
            return pa.ipc.open_stream(source)
        except READ_FAULTS as error:
            raise DataError(f"{file}: not a whole Arrow file ({shown(error, 200)})") from error

    @staticmethod
    def columns(file: InputFile) -> pa.Schema:
        return Arrow.open(file).schema

    @staticmethod
    def blocks(file: InputFile, columns: Sequence[str]) -> Iterator[Block]:
        reader, row = Arrow.open(file), 0
        while True:
            try:
                batch = reader.read_next_batch()
                batch.validate(full=True)
            except StopIteration:
                return
            except READ_FAULTS as error:
                raise _damaged(file, row, error) from error
            for low in range(0, len(batch), BLOCK_ROWS):
                part = batch.slice(low, BLOCK_ROWS).select(list(columns))
                yield Block(row + 1, part, 0.0)
                row += len(part)


def _damaged(file: InputFile, row: int, error: BaseException) -> DataError:
    return DataError(f"{file}: damaged after row {row} ({shown(error, 200)}); fetch the file again")
