"""Rows of files as they are read, in this process or by a worker of a cluster, which sends them here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import pyarrow as pa

from recpipe.common.saved import Damaged, typed_as
from recpipe.data.columns import Columns
from recpipe.data.encoding import Encoded, Encoding
from recpipe.data.files import RowChecks
from recpipe.data.records import InputFile
from recpipe.data.sent import Sent, arrays_of, columns_of, packed, unpacked


@dataclass(frozen=True)
class _Head:
    """What a worker says of ``Read`` beside its arrays and rows."""

    file: int
    missing: dict[str, int]
    share: float
    left_out: int
    where: str
    first_row: int
    worst: tuple[int, str] | None


@dataclass(frozen=True)
class Read:
    """Rows of a file (its number) that were read: samples, also of bad rows; how many have no value of each
    feature; what is wrong with them; the columns that say their parts; the share of the file so far; and how
    many bad rows are not among them."""

    file: int
    columns: Columns
    missing: dict[str, int]
    checks: RowChecks
    of_parts: pa.RecordBatch
    share: float
    left_out: int

    def packed(self) -> bytes:
        """What ``unpacked`` takes, in another process."""
        checks = self.checks
        own = self.file, self.missing, self.share, self.left_out
        head = _Head(*own, str(checks.file), checks.first_row, checks.worst)
        return packed(Sent(asdict(head), arrays_of(self.columns) | {"good": checks.good}, self.of_parts))

    @classmethod
    def unpacked(cls, content: bytes) -> Read:
        """The inverse of ``packed``; ``ValueError`` if it is not as it was written."""
        sent = unpacked(content)
        head = typed_as(_Head, sent.head, "its head")
        columns = columns_of(sent.arrays)
        if sent.rows is None or "good" not in sent.arrays or len(sent.arrays["good"]) != len(columns):
            raise Damaged("it does not say which rows are good")
        checks = RowChecks(head.where, head.first_row, len(columns))
        checks.good, checks.worst = sent.arrays["good"], head.worst
        return cls(head.file, columns, head.missing, checks, sent.rows, head.share, head.left_out)


@dataclass(frozen=True)
class Reader:
    """Reads the columns ``names`` of ``files``, piece by piece."""

    files: Sequence[InputFile]
    names: Sequence[str]
    of_parts: Sequence[str]
    encoding: Encoding
    labelled: bool

    def __call__(self, number: int, groups: range | None) -> Iterator[Read]:
        """What is in some row groups of a file, or in all of it."""
        file = self.files[number]

        def read(rows: pa.RecordBatch) -> tuple[Encoded, RowChecks, pa.RecordBatch]:
            checks = RowChecks(str(file), 1, len(rows))
            return self.encoding.read(rows, checks, self.labelled), checks, rows.select([*self.of_parts])

        for block, (encoded, checks, of_parts) in file.each(self.names, read, groups):
            checks.first_row = block.first_row
            yield Read(number, *encoded, checks, of_parts, block.share, block.left_out)

    def send(self, number: int, groups: range | None) -> Iterator[bytes]:
        """The same, ``packed``."""
        return (read.packed() for read in self(number, groups))
