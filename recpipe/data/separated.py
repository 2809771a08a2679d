"""Records from text with separators (CSV, TSV), all columns as text: what its values are, the features say.

pyarrow parses it; what is written plainly, a compiled loop cuts into columns.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.csv

from recpipe.common.loops import at_hand
from recpipe.data import text
from recpipe.data.remote import size_of
from recpipe.data.text import PACKED, READ_FAULTS, Block, Made, count_of, made, made_ahead, text_blocks
from recpipe.data.text_columns import TextColumns
from recpipe.errors import DataError, shown

if TYPE_CHECKING:
    from recpipe.data.records import InputFile

log = logging.getLogger(__name__)

SEPARATORS = {",": "comma", "\t": "tab", ";": "semicolon", "|": "bar"}
HEAD_BYTES = 1 << 20
"""Of text, in which its separator and its header are looked for."""
LONG = 32 << 20
"""Bytes of text that take longer to parse than it takes to import numba."""


class Separated:
    """Text with separators, all columns as text."""

    @staticmethod
    def layout(file: InputFile) -> tuple[str, bool, list[str]]:
        """The separator, whether there is a header, and the columns' names."""
        rules = file.rules
        quote = rules.quote.encode() if rules.quote else None
        head = bytes(next(text_blocks(file, quote, size=HEAD_BYTES), (b"", 1.0))[0])
        lines = head.decode(errors="replace").splitlines()[:50]
        if not lines:
            raise DataError(f"{file}: the file is empty")
        separator = rules.separator or _found_separator(file, lines)
        first = _first_cells(file, lines, separator)
        if rules.columns:
            if len(rules.columns) != len(first):
                raise DataError(
                    f"{file}: data.columns names {len(rules.columns)} columns and the first row has "
                    f"{len(first)}, split by '{shown(separator)}'"
                )
            named = first == list(rules.columns) if rules.header is None else rules.header
            return separator, named, list(rules.columns)
        if rules.header is not None:
            header = rules.header
        else:
            header = not any(re.fullmatch(r"\s*[-+.\d][-+.\deE]*\s*", cell) for cell in first)
            if not header:
                log.info("%s: no header, for its first row has numbers: columns are c0, c1 ...", file)
        return separator, header, first if header else [f"c{n}" for n in range(len(first))]

    @staticmethod
    def columns(file: InputFile) -> pa.Schema:
        return pa.schema([pa.field(name, pa.string()) for name in file.layout[2]])

    @staticmethod
    def each(
        file: InputFile,
        columns: Sequence[str],
        make: Callable[[pa.RecordBatch], Made],
        start: int = 0,
        to_the_end: bool = False,
    ) -> Iterator[tuple[Block, Made]]:
        """As of ``InputFile``. ``to_the_end``: all blocks will be asked for, and not perhaps the first."""
        separator, header, names = file.layout
        skipped = int(header and not start)
        convert = pa.csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()),
            include_columns=list(columns),
            strings_can_be_null=False,
        )

        def options(text: memoryview, first: bool) -> tuple[pa.csv.ReadOptions, pa.csv.ParseOptions]:
            # All in one piece, in the calling thread.
            read = pa.csv.ReadOptions(
                column_names=names, skip_rows=skipped * first, block_size=len(text) + 1, use_threads=False
            )
            return read, pa.csv.ParseOptions(
                delimiter=separator, quote_char=file.rules.quote or False, newlines_in_values=True
            )

        cut = TextColumns(names, columns, separator, file.rules.quote)
        is_long = size_of(file.path) >= LONG
        is_quick = at_hand() or is_long

        def parsed(block: tuple[memoryview, bool, float]) -> list[tuple[pa.RecordBatch, Future[Made]]]:
            content, first, _ = block
            found = cut(content, bool(skipped and first)) if is_quick else None
            if found is None:
                found = pa.csv.read_csv(pa.BufferReader(content), *options(content, first), convert)
            return [(rows, made(make, rows)) for rows in found.to_batches()]

        row, quote = 0, (file.rules.quote or "").encode()
        # Cutting keeps half a block, and the columns that are made of it, in a core's cache.
        texts = text_blocks(file, quote or None, start, text.BLOCK_BYTES // 2 if is_quick else None)
        blocks = ((content, not number, share) for number, (content, share) in enumerate(texts))
        for (content, first, share), future in made_ahead(
            parsed, blocks, "recpipe-parse", to_the_end and is_long
        ):
            try:
                batches = future.result()
            except READ_FAULTS as error:
                before = row - skipped * first
                raise _text_fault(file, bytes(content), before, *options(content, first), error) from error
            if share == 1 and quote and count_of(content, quote, 0, len(content)) % 2:
                _require_closed(file, bytes(content), quote, row, options(content, first))
            for rows, own in batches:
                yield Block(row + 1, rows, share), own.result()
                row += len(rows)


def _require_closed(
    file: InputFile, text: bytes, quote: bytes, row: int, how: tuple[pa.csv.ReadOptions, pa.csv.ParseOptions]
) -> None:
    """``DataError`` if the last value of the file's last ``text`` is all that follows a quote which is not
    closed. A quote within a text that has none around it is a character as others are."""
    name = how[0].column_names[-1]
    last = pa.csv.ConvertOptions(column_types={name: pa.string()}, include_columns=[name])
    values = pa.csv.read_csv(pa.BufferReader(text), *how, last).column(0)
    value = str(values[-1].as_py()) if len(values) else ""
    if value.endswith("\n") and not text.rstrip().endswith(quote):
        raise DataError(
            f"{file}, row {row + len(values)}: the quote before '{shown(value)}' is not closed; correct the "
            "file, or pass data.quote='' if quotes are characters as others are"
        )


def _text_fault(
    file: InputFile,
    text: bytes,
    row: int,
    read: pa.csv.ReadOptions,
    parse: pa.csv.ParseOptions,
    error: BaseException,
) -> DataError:
    """What is wrong in text, before which there are ``row`` rows (-1: its first line has names)."""
    for number, content in enumerate(text.split(b"\n"), row + 1):
        try:
            content.decode()
        except UnicodeDecodeError:
            return DataError(
                f"{file}, row {number}: '{shown(content)}' is not UTF-8; "
                "pass data.encoding=latin-1, for example"
            )
    if bad := _bad_row(text, read, parse):
        at = text.find(bad.text.encode())
        line = row + text.count(b"\n", 0, max(0, at)) + 1
        return DataError(
            f"{file}, row {line}: has {bad.actual_columns} columns instead of {bad.expected_columns} "
            f"('{shown(bad.text)}'); quote what holds the separator, or correct data.separator"
        )
    return DataError(f"{file}: cannot be read after row {max(0, row)} ({shown(error, 200)})")


def _bad_row(text: bytes, read: pa.csv.ReadOptions, parse: pa.csv.ParseOptions) -> pa.csv.InvalidRow | None:
    """The first row with another number of columns. It is asked for once a read has failed, of text that is
    UTF-8: of other text pyarrow's handler of such rows prints a traceback, and is not called."""
    found: list[pa.csv.InvalidRow] = []

    def note(row: pa.csv.InvalidRow) -> str:
        found.append(row)
        return "error"

    parse.invalid_row_handler = note
    with suppress(*READ_FAULTS):
        pa.csv.read_csv(pa.BufferReader(text), read, parse)
    return found[0] if found else None


def _first_cells(file: InputFile, lines: Sequence[str], separator: str) -> list[str]:
    """What the first record has. ``DataError`` for one that cannot be read, as a header over several lines,
    which pyarrow does not skip."""
    quote, header = file.rules.quote, file.rules.header
    marks = accumulate(line.count(quote) if quote else 0 for line in lines)
    size = next((n for n, count in enumerate(marks, 1) if count % 2 == 0), 1)
    try:
        first = _cells("\n".join(lines[:size]), separator, quote)
    except READ_FAULTS as error:
        raise DataError(f"{file}: its first row cannot be read ({shown(error, 200)})") from error
    if header is not False and not file.rules.columns and any("\n" in cell for cell in first):
        raise DataError(
            f"{file}: a name in its first row goes over two lines; write it in one, or, if these are values, "
            "name the columns, 'data.columns=[label,user]'"
        )
    return first


def _cells(record: str, separator: str, quote: str | None) -> list[str]:
    parse = pa.csv.ParseOptions(delimiter=separator, quote_char=quote or False, newlines_in_values=True)
    whole = pa.csv.ReadOptions(autogenerate_column_names=True)
    first = pa.csv.read_csv(pa.BufferReader(record.encode() + b"\n"), whole, parse)
    as_text = pa.csv.ConvertOptions(
        column_types=dict.fromkeys(first.column_names, pa.string()), strings_can_be_null=False
    )
    table = pa.csv.read_csv(pa.BufferReader(record.encode() + b"\n"), whole, parse, as_text)
    return [str(column[0].as_py()) for column in table.columns]


def _found_separator(file: InputFile, lines: Sequence[str]) -> str:
    if file.path.name.removesuffix(file.path.suffix if file.path.suffix in PACKED else "").endswith(
        (".tsv", ".tab")
    ):
        return "\t"
    counts = {mark: min(line.count(mark) for line in lines) for mark in SEPARATORS}
    found = max(counts, key=lambda mark: counts[mark])
    if not counts[found]:
        return ","
    if found != ",":
        log.info("%s: columns are separated by %s", file, SEPARATORS[found])
    return found
