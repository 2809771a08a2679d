"""Columns of the input as they are in its files, row by row beside the batches made of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.csv

from recpipe.data.config import CriteoConfig, DataConfig, FilesConfig
from recpipe.data.derived import derived_files
from recpipe.data.files import input_files, line_blocks
from recpipe.data.records import InputFile, require_columns
from recpipe.data.sources import criteo
from recpipe.data.sources.criteo_columns import COLUMNS
from recpipe.data.sources.npy import triples
from recpipe.errors import DataError, UserError, nearest_or_all, shown


def has_columns(config: DataConfig) -> bool:
    """Whether the data has files whose columns can be read by name, or Criteo's text."""
    text = isinstance(config, CriteoConfig) and config.name == "criteo" and not triples(config.path)
    return isinstance(config, FilesConfig) or text


def read_columns(config: DataConfig, names: Sequence[str]) -> Iterator[pa.Table]:
    """Blocks of the columns ``names`` of all rows, in the order of the files and of their rows.

    Criteo's fields are text. ``DataError`` for a column that a file does not have, and for lists.
    """
    if isinstance(config, FilesConfig):
        return _of_files(derived_files(config)[0], list(names))
    if not has_columns(config) or not isinstance(config, CriteoConfig):
        raise UserError(f"data={config.name} has no files with named columns")
    for name in names:
        if name not in COLUMNS:
            raise DataError(f"Criteo's files have no column '{shown(name)}'; {nearest_or_all(name, COLUMNS)}")
    return _of_criteo(input_files(config.path, criteo.SUFFIXES), list(names))


class Beside:
    """The blocks of ``read_columns``, taken as many rows at a time as batches have."""

    def __init__(self, blocks: Iterator[pa.Table]) -> None:
        self._blocks = blocks
        self._rest: pa.Table | None = None

    def take(self, rows: int) -> pa.Table:
        """The next ``rows``; ``UserError`` if the files have fewer than they had."""
        rest = self._rest
        while rest is None or len(rest) < rows:
            if (more := next(self._blocks, None)) is None:
                raise UserError("the input's files have changed while they were read; start again")
            rest = more if rest is None else pa.concat_tables([rest, more])
        self._rest = rest.slice(rows)
        return rest.slice(0, rows)


def _of_files(files: Sequence[InputFile], names: list[str]) -> Iterator[pa.Table]:
    first = files[0].columns
    for file in files:
        require_columns(file, names)
        for name in names:
            kind, other = file.columns.field(name).type, first.field(name).type
            if kind != other:
                raise DataError(
                    f"{file}, column {shown(name)}: holds {kind} here and {other} in {files[0]}; write both "
                    "files alike"
                )
    for file in files:
        for block in file.blocks(names):
            yield pa.Table.from_batches([block.rows])


def _of_criteo(files: Sequence[Path], names: list[str]) -> Iterator[pa.Table]:
    for file in files:
        for text, _ in line_blocks(file, criteo.BLOCK_BYTES):
            fields = text.partition(b"\n")[0].count(b"\t") + 1
            there = COLUMNS[len(COLUMNS) - fields :]
            if not set(names) <= set(there):
                raise DataError(f"{file}: no column '{shown(names[0])}': its rows have no label")
            options = pa.csv.ConvertOptions(
                include_columns=names,
                column_types=dict.fromkeys(there, pa.string()),
                strings_can_be_null=True,
                null_values=[""],
            )
            yield pa.csv.read_csv(
                pa.BufferReader(text),
                pa.csv.ReadOptions(column_names=there, block_size=len(text)),
                pa.csv.ParseOptions(delimiter="\t", quote_char=False, ignore_empty_lines=False),
                options,
            )
