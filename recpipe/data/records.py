"""The rows of files as users have them, in record batches: one reader for every format, folder and partition.

Parquet, Arrow (Feather), JSON lines, and text with separators are read by pyarrow. Text is read as text: what
its values are, the features say (``recpipe.data.values``), and no reader guesses it.
"""

from __future__ import annotations

import glob
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq

from recpipe.data.config import FilesConfig
from recpipe.data.files import TextRules, check_readable, natural_key
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
PACKED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
SEPARATORS = {",": "comma", "\t": "tab", ";": "semicolon", "|": "bar"}
BLOCK_ROWS = 32768
BLOCK_BYTES = 16 << 20
"""Of text, parsed at a time."""
PLAIN = TextRules()
READ_FAULTS = (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError)
"""The errors that pyarrow raises for damaged files, including damaged names and sizes."""


class Block(NamedTuple):
    """Rows of a file: the number of the first one (from 1), and the share of the file read so far."""

    first_row: int
    rows: pa.RecordBatch
    share: float
    left_out: int = 0
    """How many bad rows are not among them."""


@dataclass(frozen=True)
class InputFile:
    """One file, its format, and the columns that its folders' names are (Hive: ``dt=2026-03-01/part.parquet``
    has a column ``dt`` of text)."""

    path: Path
    format: Format
    partition: Mapping[str, str] = field(default_factory=dict)
    rules: TextRules = PLAIN

    def __str__(self) -> str:
        return str(self.path)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that its rows are read from."""
        return (self.path,)

    @cached_property
    def columns(self) -> pa.Schema:
        """Names and types of its columns; ``DataError`` if it is not a whole file of its format."""
        own = _READERS[self.format].columns(self)
        try:
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

    def blocks(self, columns: Sequence[str], start: int = 0) -> Iterator[Block]:
        """Its rows with these ``columns``; ``DataError`` where it is damaged.

        ``start``: the byte of plain text (CSV, JSON) after which whole lines are read; rows are then counted
        from there.
        """
        require_columns(self, columns)
        reader, own = _READERS[self.format], [name for name in columns if name not in self.partition]
        for block in reader.blocks(self, own, start) if start else reader.blocks(self, own):
            yield block._replace(rows=self.with_partition(block.rows, columns))

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


def files_of(config: FilesConfig) -> tuple[InputFile, ...]:
    """The files of a ``data`` node."""
    return input_files(config.path, cast(Format | None, config.format), config.rules())


def require_columns(file: InputFile, columns: Sequence[str]) -> None:
    """``DataError`` for a column that ``file`` lacks or has twice."""
    names = file.columns.names
    for name in columns:
        found = names.count(name)
        if not found:
            hint = _separator_hint(file, names) or nearest_or_all(name, names)
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


def input_files(path: Any, kind: Format | None = None, rules: TextRules = PLAIN) -> tuple[InputFile, ...]:
    """The files that ``path`` means, in time order: a file, a folder, a pattern such as ``day_*.csv``, or a
    list of these, which keeps its order.

    Of a folder, the files of known formats in natural order (day_2 before day_10), those of its Hive
    partitions too, but none whose name begins with a point or an underscore (Spark's ``_SUCCESS``).
    ``DataError`` for a path that does not exist or holds no file.
    """
    if isinstance(path, (list, tuple)):
        return tuple(file for item in path for file in input_files(item, kind, rules))
    base = Path(str(path)).expanduser()
    if base.is_dir():
        found = list(_in_folder(base, kind))
        if not found:
            known = " ".join(suffix for suffix, own in SUFFIXES.items() if kind in (None, own))
            raise DataError(
                f"{base}: no data file in this directory; looked for {known}, also in Hive folders"
            )
    elif base.exists():
        found = [base]
    else:
        matches = glob.glob(str(base), recursive=True)  # noqa: PTH207  Path.glob has no absolute patterns
        found = sorted((Path(match) for match in matches if Path(match).is_file()), key=natural_key)
        if not found:
            raise DataError(f"{base}: no such file or directory (data.path, seen from {Path.cwd()})")
    top = base if base.is_dir() else base.parent
    made = []
    for file in found:
        check_readable(file)
        made.append(InputFile(file, kind or _format(file), _partition(file, top), rules))
    kinds = sorted({file.format for file in made})
    if len(kinds) > 1:
        raise DataError(
            f"{base}: holds files of several formats ({', '.join(kinds)}); say which, data.format="
        )
    return tuple(made)


def _in_folder(folder: Path, kind: Format | None) -> Iterator[Path]:
    for entry in sorted(folder.iterdir(), key=natural_key):
        if entry.name[0] in "._":
            continue
        if entry.is_dir() and "=" in entry.name:
            yield from _in_folder(entry, kind)
        elif entry.is_file() and (own := format_by_name(entry)) and kind in (None, own):
            yield entry


def format_by_name(file: Path) -> Format | None:
    """The format that the file's suffix says; None: none that is known."""
    return SUFFIXES.get(Path(file.stem).suffix if file.suffix in PACKED else file.suffix)


def _partition(file: Path, top: Path) -> dict[str, str]:
    """The columns in the names of the folders between ``top`` and ``file``."""
    try:
        parts = file.parent.relative_to(top).parts
    except ValueError:  # found by a pattern
        parts = file.parent.parts
    found = {}
    for part in parts:
        name, equals, value = part.partition("=")
        if equals and name:
            found[unquote(name)] = "" if value == "__HIVE_DEFAULT_PARTITION__" else unquote(value)
    return found


def _format(file: Path) -> Format:
    """By suffix, else by the first bytes."""
    if known := format_by_name(file):
        return known
    with file.open("rb") as stream:
        start = stream.read(6)
    if start.startswith(b"PAR1"):
        return "parquet"
    if start == b"ARROW1":
        return "arrow"
    return "json" if start.lstrip()[:1] == b"{" else "csv"


def _damaged(file: InputFile, row: int, error: BaseException) -> DataError:
    return DataError(f"{file}: damaged after row {row} ({shown(error, 200)}); fetch the file again")


class _Parquet:
    """Parquet, whose pages have checksums that are compared."""

    @staticmethod
    def open(file: InputFile) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(os.fspath(file.path), memory_map=True, page_checksum_verification=True)
        except READ_FAULTS as error:
            text = any(kind in {".csv", ".tsv", ".txt"} for kind in file.path.suffixes)
            remedy = "; text with separators is read by data.format=csv" if text else ""
            raise DataError(f"{file}: not a whole Parquet file ({shown(error, 200)}){remedy}") from error

    @staticmethod
    def columns(file: InputFile) -> pa.Schema:
        return _Parquet.open(file).schema_arrow

    @staticmethod
    def blocks(file: InputFile, columns: Sequence[str]) -> Iterator[Block]:
        parquet, row = _Parquet.open(file), 0
        total = parquet.metadata.num_rows
        reader = parquet.iter_batches(BLOCK_ROWS, columns=list(columns), use_threads=False)
        while True:
            try:
                batch = next(reader, None)
            except READ_FAULTS as error:
                raise _damaged(file, row, error) from error
            if batch is None:
                break
            yield Block(row + 1, batch, (row + len(batch)) / max(1, total))
            row += len(batch)
        if row != total:
            raise DataError(f"{file}: damaged, {row} rows instead of {total}; fetch the file again")


class _Arrow:
    """Arrow's own format (Feather): a file or a stream of record batches."""

    @staticmethod
    def open(file: InputFile) -> pa.RecordBatchReader:
        try:
            source = pa.memory_map(os.fspath(file.path))
            if source.read(6) == b"ARROW1":
                opened = pa.ipc.open_file(source)
                batches = (opened.get_batch(n) for n in range(opened.num_record_batches))
                return pa.RecordBatchReader.from_batches(opened.schema, batches)
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


def text_blocks(file: InputFile, quote: bytes | None = None, start: int = 0) -> Iterator[tuple[bytes, float]]:
    """Blocks of whole records of a plain or packed text file in UTF-8, with the share read so far. With a
    ``quote``, a line's end between two of them is within a record. ``start``: the byte of a plain file after
    whose line they begin."""
    total, rest = max(1, file.path.stat().st_size), b""
    codec = file.rules.encoding.lower().replace("_", "-")
    decode = codec not in ("utf-8", "utf8", "ascii")
    try:
        with pa.OSFile(os.fspath(file.path), "rb") as raw:
            packed = PACKED.get(file.path.suffix)
            stream = pa.CompressedInputStream(raw, packed) if packed else raw
            first = True
            if start:
                stream.seek(start)
            while data := stream.read(BLOCK_BYTES):
                if decode:
                    data = _decoded(file, data, codec)
                if first:
                    data = data[data.find(b"\n") + 1 :] if start else data.removeprefix(b"\xef\xbb\xbf")
                    first = False
                data = rest + data
                end = _last_end(data, quote)
                if not end and len(data) > 2 * BLOCK_BYTES:
                    raise DataError(
                        f"{file}: a line of more than {2 * BLOCK_BYTES:,} bytes; is this a text file?"
                    )
                if end:
                    yield data[:end], min(1.0, raw.tell() / total)
                rest = data[end:]
    except (OSError, EOFError) as error:
        why = f"cannot be read ({error}); fetch or pack the file again"
        if "runcated" in str(error):
            why = "the archive is truncated; fetch or pack the file again (data.on_bad_row does not apply)"
        raise DataError(f"{file}: {why}") from error
    if rest:
        yield rest + b"\n", 1.0


def _decoded(file: InputFile, data: bytes, codec: str) -> bytes:
    try:
        return data.decode(codec).encode()
    except (UnicodeDecodeError, LookupError) as fault:
        raise DataError(
            f"{file}: is not text in {file.rules.encoding} ({fault}); pass data.encoding="
        ) from fault


def _last_end(data: bytes, quote: bytes | None) -> int:
    """Where the last whole record ends; 0: there is none."""
    end = data.rfind(b"\n") + 1
    if quote is None or not end or quote not in data:
        return end
    marks = np.frombuffer(data, np.uint8)
    inside = np.cumsum(marks == quote[0]) % 2
    ends = np.flatnonzero((marks == ord("\n")) & (inside == 0))
    return int(ends[-1]) + 1 if len(ends) else 0


class _Csv:
    """Text with separators, all columns as text."""

    @staticmethod
    def layout(file: InputFile) -> tuple[str, bool, list[str]]:
        """The separator, whether there is a header, and the columns' names."""
        rules = file.rules
        quote = rules.quote.encode() if rules.quote else None
        head = next(text_blocks(file, quote), (b"", 1.0))[0][: 1 << 20]
        lines = head.decode(errors="replace").splitlines()[:50]
        if not lines:
            raise DataError(f"{file}: the file is empty")
        separator = rules.separator or _found_separator(file, lines)
        first = _cells(lines[0], separator, rules.quote)
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
    def blocks(file: InputFile, columns: Sequence[str], start: int = 0) -> Iterator[Block]:
        separator, header, names = file.layout
        header = header and not start
        quote = (file.rules.quote or "").encode()
        convert = pa.csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()),
            include_columns=list(columns),
            strings_can_be_null=False,
        )
        row = 0
        for text, share in text_blocks(file, quote or None, start):
            parse = pa.csv.ParseOptions(
                delimiter=separator,
                quote_char=file.rules.quote or False,
                newlines_in_values=bool(quote) and quote in text,
            )
            # Two parts of a block are parsed at the same time.
            read = pa.csv.ReadOptions(
                column_names=names, skip_rows=int(header and not row), block_size=len(text) // 2 + (1 << 16)
            )
            try:
                table = pa.csv.read_csv(pa.BufferReader(text), read, parse, convert)
            except READ_FAULTS as error:
                raise _text_fault(file, text, row - int(header and not row), read, parse, error) from error
            for batch in table.combine_chunks().to_batches():
                yield Block(row + 1, batch, share)
                row += len(batch)


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


def _cells(line: str, separator: str, quote: str | None) -> list[str]:
    parse = pa.csv.ParseOptions(delimiter=separator, quote_char=quote or False)
    whole = pa.csv.ReadOptions(autogenerate_column_names=True)
    first = pa.csv.read_csv(pa.BufferReader(line.encode() + b"\n"), whole, parse)
    as_text = pa.csv.ConvertOptions(
        column_types=dict.fromkeys(first.column_names, pa.string()), strings_can_be_null=False
    )
    table = pa.csv.read_csv(pa.BufferReader(line.encode() + b"\n"), whole, parse, as_text)
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


class _Json:
    """JSON, an object a line; the types are those of the first block."""

    @staticmethod
    def columns(file: InputFile) -> pa.Schema:
        text = next(text_blocks(file), (b"", 1.0))[0]
        if not text.strip():
            raise DataError(f"{file}: the file is empty")
        try:
            return pa.json.read_json(
                pa.BufferReader(text), pa.json.ReadOptions(block_size=len(text) + 1)
            ).schema
        except READ_FAULTS as error:
            raise DataError(f"{file}: not JSON, an object a line ({shown(error, 200)})") from error

    @staticmethod
    def blocks(file: InputFile, columns: Sequence[str], start: int = 0) -> Iterator[Block]:
        known, row = file.columns, 0
        wanted = pa.schema([known.field(name) for name in columns])
        parse = pa.json.ParseOptions(explicit_schema=wanted, unexpected_field_behavior="ignore")
        for text, share in text_blocks(file, start=start):
            read = pa.json.ReadOptions(block_size=len(text) + 1)
            try:
                table = pa.json.read_json(pa.BufferReader(text), read, parse)
            except READ_FAULTS as error:
                raise DataError(
                    f"{file}: cannot be read after row {row} ({shown(error, 200)}); a value has the type "
                    "that its column has in the first rows"
                ) from error
            for batch in table.combine_chunks().to_batches():
                yield Block(row + 1, batch.select(list(columns)), share)
                row += len(batch)


_READERS: dict[Format, Any] = {"parquet": _Parquet, "csv": _Csv, "json": _Json, "arrow": _Arrow}
