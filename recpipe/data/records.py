"""The rows of files as users have them, in record batches: one reader for every format, folder and partition.

Parquet, Arrow (Feather), JSON lines, and text with separators are read by pyarrow. Text is read as text: what
its values are, the features say (``recpipe.data.values``), and no reader guesses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal

import pyarrow as pa

from recpipe.data.columnar import Arrow, Parquet
from recpipe.data.files import TextRules
from recpipe.data.json_lines import JsonLines
from recpipe.data.remote import AnyPath
from recpipe.data.separated import SEPARATORS, Separated
from recpipe.data.text import Block, Made, made_ahead
from recpipe.errors import DataError, nearest_or_all, shown

Format = Literal["parquet", "csv", "json", "arrow"]
PLAIN = TextRules()


@dataclass(frozen=True)
class InputFile:
    """One file, its format, and the columns that its folders' names are (Hive: ``dt=2026-03-01/part.parquet``
    has a column ``dt`` of text)."""

    path: AnyPath
    format: Format
    partition: Mapping[str, str] = field(default_factory=dict)
    rules: TextRules = PLAIN

    def __str__(self) -> str:
        return str(self.path)

    @property
    def paths(self) -> tuple[AnyPath, ...]:
        """The files that its rows are read from."""
        return (self.path,)

    @cached_property
    def columns(self) -> pa.Schema:
        """Names and types of its columns; ``DataError`` if it is not a whole file of its format."""
        try:
            own = _READERS[self.format].columns(self)
            names = own.names
        except UnicodeDecodeError as error:
            raise DataError(f"{self}: the name of a column is not UTF-8 ({shown(error, 200)})") from error
        for name in self.partition:
            if name in names:
                raise DataError(
                    f"{self}: the folder {name}={self.partition[name]} and the file both have a column "
                    f"'{shown(name)}'; rename one of them"
                )
            own = own.append(pa.field(name, pa.string()))
        return own

    @cached_property
    def layout(self) -> tuple[str, bool, list[str]]:
        """Of text with separators: the separator, whether there is a header, and the columns' names. They are
        looked for, and told, once."""
        return Separated.layout(self)

    @property
    def parts(self) -> list[range | None]:
        """Parts that can be read apart from each other: row groups of Parquet; None: the whole file."""
        return Parquet.parts(self) if self.format == "parquet" else [None]

    def blocks(self, columns: Sequence[str], start: int = 0, groups: range | None = None) -> Iterator[Block]:
        """Its rows with these ``columns``; ``DataError`` where it is damaged.

        ``start``: the byte of plain text (CSV, JSON) after which whole lines are read; rows are then counted
        from there. ``groups``: the row groups of Parquet that are read.
        """
        require_columns(self, columns)
        own = [name for name in columns if name not in self.partition]
        if self.format == "csv":
            blocks = (block for block, _ in Separated.each(self, own, lambda rows: None, start))
        else:
            where = [place for place in (start, groups) if place]
            blocks = _READERS[self.format].blocks(self, own, *where)
        for block in blocks:
            yield block._replace(rows=self.with_partition(block.rows, columns))

    def each(
        self, columns: Sequence[str], make: Callable[[pa.RecordBatch], Made], groups: range | None = None
    ) -> Iterator[tuple[Block, Made]]:
        """Its ``blocks`` with what ``make`` makes of the rows of each, in threads, while earlier ones are
        worked on. A thread parses a block of text and makes something of it: nothing leaves its core's cache.
        """
        if self.format == "csv":
            require_columns(self, columns)
            own = [name for name in columns if name not in self.partition]
            whole = partial(self.with_partition, columns=columns)
            yield from Separated.each(self, own, lambda rows: make(whole(rows)), to_the_end=True)
            return
        yield from each_of(self.blocks(columns, groups=groups), make)

    def first_rows(self, columns: Sequence[str]) -> pa.RecordBatch | None:
        """The first rows of these columns, as they are written; None without rows."""
        block = next(self.blocks(columns), None)
        return None if block is None else block.rows

    def is_all_text(self, column: str) -> bool:
        """Whether all values of ``column`` are text, since nothing else can be written there."""
        return self.format == "csv" or column in self.partition

    def with_partition(self, rows: pa.RecordBatch, columns: Sequence[str]) -> pa.RecordBatch:
        """``rows`` of the file itself with those of ``columns`` that its folders' names are."""
        folders = {name: pa.repeat(pa.scalar(value), len(rows)) for name, value in self.partition.items()}
        arrays = [folders[name] if name in folders else rows[name] for name in columns]
        return pa.record_batch(arrays, list(columns))


def each_of(blocks: Iterator[Block], make: Callable[[pa.RecordBatch], Made]) -> Iterator[tuple[Block, Made]]:
    """``blocks`` with what ``make`` makes of the rows of each, in threads, while others are worked on."""
    for block, future in made_ahead(lambda block: make(block.rows), blocks, "recpipe-encode"):
        yield block, future.result()


def require_columns(file: InputFile, columns: Sequence[str]) -> None:
    """``DataError`` for a column that ``file`` lacks or has twice."""
    names = file.columns.names
    for name in columns:
        found = names.count(name)
        if not found:
            hint = _separator_hint(file, names) or _header_hint(file) or nearest_or_all(name, names)
            raise DataError(f"{file}: no column '{shown(name)}'; {hint}")
        if found > 1:
            raise DataError(f"{file}: {found} columns are called '{shown(name)}'; rename all but one")


def _separator_hint(file: InputFile, names: Sequence[str]) -> str:
    if file.format != "csv" or len(names) != 1:
        return ""
    counts = {mark: names[0].count(mark) for mark in SEPARATORS}
    mark = max(counts, key=lambda m: counts[m])
    if not counts[mark]:
        return ""
    shows = shown(mark)
    return f"its header is one column with {counts[mark]} times '{shows}': pass data.separator='{shows}'"


def _header_hint(file: InputFile) -> str:
    if file.format != "csv" or file.rules.columns or file.rules.header is not None or file.layout[1]:
        return ""
    return (
        f"its first row has numbers, so that columns are called {', '.join(file.layout[2][:3])} ...: pass "
        "data.header=true if these are names, else name the columns, 'data.columns=[label,user]'"
    )


_READERS: dict[Format, Any] = {"parquet": Parquet, "csv": Separated, "json": JsonLines, "arrow": Arrow}
