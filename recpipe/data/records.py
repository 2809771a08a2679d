"""The rows of files as users have them, in record batches: one reader for every format, folder and partition.

Parquet, Arrow (Feather), JSON lines, and text with separators are read by pyarrow. Text is read as text: what
its values are, the features say (``recpipe.data.values``), and no reader guesses it.
"""

from __future__ import annotations

import glob
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from recpipe.common.loops import at_hand
from recpipe.data import text
from recpipe.data.config import FilesConfig
from recpipe.data.files import TextRules, check_readable, natural_key, natural_path
from recpipe.data.json_lines import JsonLines
from recpipe.data.remote import AnyPath, RemotePath, located, opened, size_of
from recpipe.data.text import PACKED, READ_FAULTS, Block, Made, made, made_ahead, text_blocks
from recpipe.data.text_columns import TextColumns
from recpipe.errors import DataError, nearest_or_all, shown

log = logging.getLogger(__name__)

Format = Literal["parquet", "csv", "json", "arrow"]
SUFFIXES: dict[str, Format] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".tab": "csv",
    ".txt": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
SEPARATORS = {",": "comma", "\t": "tab", ";": "semicolon", "|": "bar"}
SPLITS = ("train", "training", "validation", "valid", "val", "dev", "test", "eval")
"""With one of these the names of files begin that hold a part of the samples, as HuggingFace's data sets have
them."""
HEAD_BYTES = 1 << 20
"""Of text, in which its separator and its header are looked for."""
BLOCK_ROWS = 32768
PART_ROWS = 1 << 20
"""Rows of a part of a Parquet file, about; its row groups are not cut."""
LONG = 32 << 20
"""Bytes of text that take longer to parse than it takes to import numba."""
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
        return _Csv.layout(self)

    @property
    def parts(self) -> list[range | None]:
        """Parts that can be read apart from each other: row groups of Parquet; None: the whole file."""
        return _Parquet.parts(self) if self.format == "parquet" else [None]

    def blocks(self, columns: Sequence[str], start: int = 0, groups: range | None = None) -> Iterator[Block]:
        """Its rows with these ``columns``; ``DataError`` where it is damaged.

        ``start``: the byte of plain text (CSV, JSON) after which whole lines are read; rows are then counted
        from there. ``groups``: the row groups of Parquet that are read.
        """
        require_columns(self, columns)
        own = [name for name in columns if name not in self.partition]
        if self.format == "csv":
            blocks = (block for block, _ in _Csv.each(self, own, lambda rows: None, start))
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
            yield from _Csv.each(self, own, lambda rows: make(self.with_partition(rows, columns)))
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


def files_of(config: FilesConfig, key: str = "path") -> tuple[InputFile, ...]:
    """The files of a ``data`` node that its ``key`` means."""
    path, kind = getattr(config, key), cast(Format | None, config.format)
    return () if path is None else input_files(path, kind, config.rules(), f"data.{key}")


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


def input_files(
    path: Any, kind: Format | None = None, rules: TextRules = PLAIN, key: str = "data.path"
) -> tuple[InputFile, ...]:
    """The files that ``path`` means, in time order: a file, a folder, a pattern such as ``day_*.csv``, or a
    list of these, which keeps its order; on this machine or elsewhere (``remote.located``).

    Of a pattern, the files in natural order of their paths; if it means folders alone, what is in these. Of a
    folder, the files of known formats in natural order (day_2 before day_10), those of its Hive
    partitions too, but none whose name begins with a point or an underscore (Spark's ``_SUCCESS``). Of a
    folder without any, those of its folder ``data``, as HuggingFace's data sets have it. ``DataError``, which
    names the ``key``, for a path that does not exist or holds no file, and for a folder with several splits.
    """
    if isinstance(path, (list, tuple)):
        return tuple(file for item in path for file in input_files(item, kind, rules, key))
    base = located(str(path))
    if base.is_dir():
        found = list(_in_folder(base, kind))
        for inner in base.iterdir() if not found else ():
            if inner.name == "data" and inner.is_dir():
                found = list(_in_folder(inner, kind))
        if not found:
            known = " ".join(suffix for suffix, own in SUFFIXES.items() if kind in (None, own))
            raise DataError(
                f"{base}: no data file in this directory; looked for {known}, also in Hive folders"
            )
        _require_one_split(base, found)
    elif base.exists():
        found = [base]
    else:
        matches = sorted(_matches(base), key=natural_path)
        found = [match for match in matches if match.is_file()]
        if not found:
            folders = [match for match in matches if match.name[0] not in "._"]
            found = [file for folder in folders for file in _in_folder(folder, kind)]
        if not found:
            seen_from = "" if isinstance(base, RemotePath) else f", seen from {Path.cwd()}"
            raise DataError(f"{base}: no such file or directory ({key}{seen_from})")
    top = base.parts if base.is_dir() else base.parts[:-1]
    made = []
    for file in found:
        _require_content(file)
        made.append(InputFile(file, kind or _format(file), _partition(file, top), rules))
    kinds = sorted({file.format for file in made})
    if len(kinds) > 1:
        raise DataError(
            f"{base}: holds files of several formats ({', '.join(kinds)}); say which, data.format="
        )
    return tuple(made)


def _matches(pattern: AnyPath) -> Sequence[AnyPath]:
    """The files and folders that a pattern means."""
    if isinstance(pattern, RemotePath):
        return pattern.glob()
    found = glob.glob(str(pattern), recursive=True)  # noqa: PTH207  Path.glob has no absolute patterns
    return [Path(match) for match in found]


def _in_folder(folder: AnyPath, kind: Format | None) -> Iterator[AnyPath]:
    entries: list[AnyPath] = [*folder.iterdir()]
    for entry in sorted(entries, key=natural_key):
        if entry.name[0] in "._":
            continue
        if entry.is_dir() and "=" in entry.name:
            yield from _in_folder(entry, kind)
        elif entry.is_file() and (own := format_by_name(entry)) and kind in (None, own):
            yield entry


def _require_one_split(folder: AnyPath, files: Sequence[AnyPath]) -> None:
    """``DataError`` if the names in a folder say that it holds several splits, ``train-00000-of-00002`` and
    ``test-00000-of-00001`` for example: nobody trains on all of them."""
    found = {word: file for word in SPLITS for file in files if re.match(rf"{word}([-_.]|$)", file.name)}
    if len(found) > 1 and all(any(file.name.startswith(word) for word in found) for file in files):
        keys = {"train": "path", "training": "path", "test": "test_path"}
        where = {word: str(file).removesuffix(file.name) for word, file in found.items()}
        named = " ".join(f"data.{keys.get(word, 'eval_path')}='{where[word]}{word}*'" for word in found)
        raise DataError(
            f"{folder}: holds the splits {', '.join(found)}, each in files of its own: name them, {named}"
        )


def _require_content(file: AnyPath) -> None:
    if not isinstance(file, RemotePath):
        check_readable(file)
    elif not file.size:
        raise DataError(f"{file}: the file is empty")


def format_by_name(file: AnyPath) -> Format | None:
    """The format that the file's suffix says; None: none that is known."""
    return SUFFIXES.get(Path(file.stem).suffix if file.suffix in PACKED else file.suffix)


def _partition(file: AnyPath, top: tuple[str, ...]) -> dict[str, str]:
    """The columns in the names of the folders between ``top`` and ``file``; of a file that a pattern found,
    in all of its folders' names."""
    parts = file.parts[:-1]
    if parts[: len(top)] == top:
        parts = parts[len(top) :]
    found = {}
    for part in parts:
        name, equals, value = part.partition("=")
        if equals and name:
            found[unquote(name)] = "" if value == "__HIVE_DEFAULT_PARTITION__" else unquote(value)
    return found


def _format(file: AnyPath) -> Format:
    """By suffix, else by the first bytes."""
    if known := format_by_name(file):
        return known
    with file.open("rb") as stream:
        start = stream.read(6)
    if start.startswith(b"PAR1"):
        return "parquet"
    if start == b"ARROW1":
        return "arrow"
    if start.lower() in (b"<!doct", b"<html>", b"<html "):
        raise DataError(f"{file}: is a web page; name the files that it lists, or a pattern: '{file}*.csv'")
    return "json" if start.lstrip()[:1] == b"{" else "csv"


def _damaged(file: InputFile, row: int, error: BaseException) -> DataError:
    return DataError(f"{file}: damaged after row {row} ({shown(error, 200)}); fetch the file again")


class _Parquet:
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
        return _Parquet.open(file).schema_arrow

    @staticmethod
    def parts(file: InputFile) -> list[range | None]:
        sizes = _Parquet.sizes(_Parquet.open(file))
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
        parquet, row = _Parquet.open(file), 0
        rows = total = parquet.metadata.num_rows
        if groups is not None:
            sizes = _Parquet.sizes(parquet)
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


class _Arrow:
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
        return _Arrow.open(file).schema

    @staticmethod
    def blocks(file: InputFile, columns: Sequence[str]) -> Iterator[Block]:
        reader, row = _Arrow.open(file), 0
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


class _Csv:
    """Text with separators, all columns as text."""

    @staticmethod
    def layout(file: InputFile) -> tuple[str, bool, list[str]]:
        """The separator, whether there is a header, and the columns' names."""
        rules = file.rules
        quote = rules.quote.encode() if rules.quote else None
        head = next(text_blocks(file, quote, size=HEAD_BYTES), (b"", 1.0))[0]
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
        file: InputFile, columns: Sequence[str], make: Callable[[pa.RecordBatch], Made], start: int = 0
    ) -> Iterator[tuple[Block, Made]]:
        """As of ``InputFile``."""
        separator, header, names = file.layout
        skipped = int(header and not start)
        convert = pa.csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()),
            include_columns=list(columns),
            strings_can_be_null=False,
        )

        def options(text: bytes, first: bool) -> tuple[pa.csv.ReadOptions, pa.csv.ParseOptions]:
            # All in one piece, in the calling thread.
            read = pa.csv.ReadOptions(
                column_names=names, skip_rows=skipped * first, block_size=len(text) + 1, use_threads=False
            )
            return read, pa.csv.ParseOptions(
                delimiter=separator, quote_char=file.rules.quote or False, newlines_in_values=True
            )

        cut = TextColumns(names, columns, separator, file.rules.quote)
        is_quick = at_hand() or size_of(file.path) >= LONG

        def parsed(block: tuple[bytes, bool, float]) -> list[tuple[pa.RecordBatch, Future[Made]]]:
            content, first, _ = block
            found = cut(content, bool(skipped and first)) if is_quick else None
            if found is None:
                found = pa.csv.read_csv(pa.BufferReader(content), *options(content, first), convert)
            return [(rows, made(make, rows)) for rows in found.to_batches()]

        row, quote = 0, (file.rules.quote or "").encode()
        # Cutting keeps half a block, and the columns that are made of it, in a core's cache.
        texts = text_blocks(file, quote or None, start, text.BLOCK_BYTES // 2 if is_quick else None)
        blocks = ((content, not number, share) for number, (content, share) in enumerate(texts))
        for (content, first, share), future in made_ahead(parsed, blocks, "recpipe-parse"):
            try:
                batches = future.result()
            except READ_FAULTS as error:
                before = row - skipped * first
                raise _text_fault(file, content, before, *options(content, first), error) from error
            if share == 1 and quote and content.count(quote) % 2:
                _require_closed(file, content, quote, row, options(content, first))
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


_READERS: dict[Format, Any] = {"parquet": _Parquet, "csv": _Csv, "json": JsonLines, "arrow": _Arrow}
