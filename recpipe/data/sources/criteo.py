"""Criteo click logs: text rows of a label, 13 integers and 26 hexadecimal ids, tab-separated.

An empty field is a missing value. Any other field is the bare value, without spaces, plus sign or quotes.
Lines end in LF or CR LF; the last one need not. Dense values x become sign(x) * log1p(|x|), missing ones 0.
Ids become 1 + mix64(id) % (rows - 1), missing ones row 0. Rows keep their order, which is time order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from recpipe.data.columns import Columns
from recpipe.data.feature import HEX, Feature
from recpipe.data.features import Features, Label
from recpipe.data.files import line_blocks
from recpipe.data.preparation import Preparation
from recpipe.data.schema import IdRule, Schema
from recpipe.data.sources.criteo_columns import COLUMNS, DENSE, SPARSE
from recpipe.errors import BadRow, DataError, nearest_or_all
from recpipe.plugin.tables import SparseFeature

SUFFIXES = (".tsv", ".txt", ".gz", ".zst", "")

BLOCK_BYTES = 8 << 20


def criteo_schema(tables: Mapping[str, int]) -> Schema:
    """The schema with ``tables`` (rows of C1 ... C26); ``DataError`` for a table missing or unknown."""
    for name in tables:
        if name not in SPARSE:
            raise DataError(f"data.tables.{name}: Criteo has no such column; {nearest_or_all(name, SPARSE)}")
    for name in SPARSE:
        if name not in tables:
            raise DataError(f"data.tables lacks {name}: state its rows, as in +data.tables.{name}=100000")
    return Schema(DENSE, tuple(SparseFeature(name, tables[name]) for name in SPARSE))


def criteo_features(tables: Mapping[str, int], ids: str, kind: str, scale: str) -> Features:
    """The same columns as ``data.features`` has them: how ids become rows, what their text is, and the scale
    of numbers."""
    dense = tuple(Feature(name, "dense", scale=scale) for name in DENSE)
    sparse = tuple(Feature(name, ids=ids, type=kind, rows=tables[name]) for name in SPARSE)
    return Features((Label(COLUMNS[0]),), dense, sparse)


class CriteoSource:
    """Text files of Criteo rows to prepare; about 8 MB of text are parsed at a time."""

    def __init__(
        self, files: Sequence[Path], tables: Mapping[str, int], skip_bad_rows: bool, labelled: bool = True
    ) -> None:
        self.files = files
        self.schema = criteo_schema(tables)
        self.multi_hot: tuple[str, ...] = ()
        self.preparation = Preparation.of(criteo_features(tables, "hash", HEX, "log"))
        self.kept: tuple[IdRule, ...] = tuple("hashed" for _ in SPARSE)
        self.missing: dict[str, int] = {}
        self.recipe: dict[str, Any] = {"source": "criteo", "skip": skip_bad_rows}
        self.rejected_rows = 0
        self._skip, self._labelled = skip_bad_rows, labelled

    def blocks(self) -> Iterator[tuple[Columns, float]]:
        """Samples of all files in order."""
        for index, file in enumerate(self.files):
            line, empty = 1, True
            for text, share in line_blocks(file, BLOCK_BYTES):
                if not self._labelled:
                    text = _with_labels(text)
                rejected = self.rejected_rows
                columns = self._parse(file, text, line)
                yield columns, (index + share) / len(self.files)
                line, empty = line + len(columns) + self.rejected_rows - rejected, False
            if empty:
                raise DataError(f"{file}: the file is empty")

    def _parse(self, file: Path, text: bytes, line: int) -> Columns:
        # Imported here: it needs pyarrow, which prepared data do not.
        from recpipe.data.sources import criteo_text

        try:
            return criteo_text.parse_plain(text)
        except criteo_text.Malformed:
            bad, good = criteo_text.bad_lines(text)
        if bad and not self._skip:
            index, row = bad[0]
            raise BadRow(f"{file}, row {line + index}: {criteo_text.fault(row)}")
        self.rejected_rows += len(bad)
        return criteo_text.parse_block(good)


def _with_labels(text: bytes) -> bytes:
    """Whole lines with a label of 0 in front, unless the first one has a label."""
    if text.partition(b"\n")[0].count(b"\t") + 1 != len(COLUMNS) - 1:
        return text
    ended = text.endswith(b"\n")
    labelled = b"0\t" + text.removesuffix(b"\n").replace(b"\n", b"\n0\t")
    return labelled + b"\n" if ended else labelled
