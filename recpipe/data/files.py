"""Input files: those that a ``data.path`` means, their text in blocks of whole lines, .npy arrays, and checks
of their rows, which name the first bad one, or count and leave out bad rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from recpipe.data.remote import is_elsewhere
from recpipe.errors import BadRow, DataError, shown


@dataclass(frozen=True)
class TextRules:
    """How text with separators is written: ``separator`` and whether there is a ``header`` are found in the
    file where they are None, and told. ``columns``: the names where there is no header."""

    separator: str | None = None
    header: bool | None = None
    columns: tuple[str, ...] = ()
    quote: str | None = '"'
    encoding: str = "utf-8"


CODECS = {".gz": "gzip", ".zst": "zstd"}


def input_files(path: Any, suffixes: Sequence[str]) -> list[Path]:
    """The files that ``path`` (a file, a directory, or a list of both) means, in time order.

    Of a directory, files with one of ``suffixes`` ("": no suffix) in natural order (day_2 before day_10), but
    none whose name starts with a point or an underscore (Spark's ``_SUCCESS``). A list keeps its order.
    ``DataError`` for a path that does not exist or holds no file.
    """
    if isinstance(path, (list, tuple)):
        return [file for item in path for file in input_files(item, suffixes)]
    if is_elsewhere(path):
        raise DataError(f"{path}: only data=files and data=parquet read what lies elsewhere; download it")
    base = Path(str(path)).expanduser()
    if not base.exists():
        raise DataError(f"{base}: no such file or directory (data.path, seen from {Path.cwd()})")
    if base.is_file():
        files = [base]
    else:
        found = [file for file in base.iterdir() if file.is_file() and file.name[0] not in "._"]
        files = sorted((file for file in found if file.suffix in suffixes), key=natural_key)
        if not files:
            kinds = " ".join(suffix or "(no suffix)" for suffix in suffixes)
            raise DataError(f"{base}: no data file in this directory; looked for {kinds}")
    for file in files:
        check_readable(file)
    return files


def check_readable(file: Path) -> None:
    """``DataError`` for a file that is empty or not readable."""
    try:
        with file.open("rb") as opened:
            if not opened.read(1):
                raise DataError(f"{file}: the file is empty")
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror})") from error


def map_npy(file: Path) -> NDArray[Any]:
    """The array in a .npy file, mapped into memory; ``DataError`` for a damaged file or one of another
    format."""
    try:
        return np.lib.format.open_memmap(file, mode="r")
    except Exception as error:  # numpy parses a header as Python, so that a damaged one can raise many errors
        raise DataError(f"{file}: not a whole .npy file ({shown(error, 200)})") from error


class Named(Protocol):
    """A file, here or elsewhere."""

    @property
    def name(self) -> str:
        """Its own name, without folders."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of its folders, and its own."""


Natural = list[tuple[bool, int, str]]


def natural_key(file: Named) -> Natural:
    """Sorts names by the numbers in them: day_2 before day_10."""
    return _natural(file.name)


def natural_path(file: Named) -> list[Natural]:
    """The same for files in several folders, whose names count first."""
    return list(map(_natural, file.parts))


def _natural(name: str) -> Natural:
    parts = re.split(r"(\d+)", name)
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def line_blocks(file: Path, block_bytes: int) -> Iterator[tuple[bytes, float]]:
    """Blocks of whole lines of a plain, .gz or .zst file, about ``block_bytes`` each, with the share read so
    far.

    The last line may lack its newline. ``DataError`` for a truncated or damaged archive, and for a line that
    is longer than a block (the file is not text in lines).
    """
    import pyarrow as pa  # imported here: prepared data need no pyarrow

    total = file.stat().st_size
    rest = b""
    try:
        with pa.OSFile(str(file), "rb") as raw:
            codec = CODECS.get(file.suffix)
            stream = pa.CompressedInputStream(raw, codec) if codec else raw
            while data := stream.read(block_bytes):
                first, end = data.find(b"\n"), data.rfind(b"\n") + 1
                if len(rest) + (first if end else len(data)) > block_bytes:
                    raise DataError(
                        f"{file}: a line of more than {block_bytes:,} bytes; is this a text file?"
                    )
                if end:
                    yield b"".join((rest, memoryview(data)[:end])), raw.tell() / total
                    rest = data[end:]
                else:
                    rest += data
    except OSError as error:
        why = f"cannot be read ({error}); fetch or pack the file again"
        if "Truncated" in str(error):
            why = "the archive is truncated; fetch or pack the file again (data.on_bad_row does not apply)"
        raise DataError(f"{file}: {why}") from error
    if rest:
        yield rest, 1.0


class RowChecks:
    """Checks of one block of n rows whose first one is row ``first_row`` (from 1) of ``file``, or of what
    else has rows. ``names``: what the rows are called instead, in messages."""

    def __init__(self, file: Path | str, first_row: int, size: int, names: Sequence[str] = ()) -> None:
        self.file, self.first_row, self._names = file, first_row, names
        self.good: NDArray[np.bool_] = np.ones(size, bool)
        self.worst: tuple[int, str] | None = None
        """The first bad row, from 0, and what is wrong with it."""

    def require(
        self, valid: NDArray[np.bool_], column: str, value_of: Callable[[int], object], remedy: str
    ) -> None:
        """Mark rows where ``valid`` (bool [n]) is false as bad; ``value_of(row)`` returns the row's value."""
        if valid.all():
            return
        self.good &= valid
        index = int(np.argmin(valid))
        if self.worst is None or index < self.worst[0]:
            value = shown(value_of(index)) or "''"
            self.worst = (index, f"column {shown(column)}: {value} {remedy}")

    def require_finite(
        self, values: NDArray[np.floating], column: str, value_of: Callable[[int], object]
    ) -> NDArray[np.float32]:
        """``values`` [n] as float32, the type of dense values; rows whose value is not finite are bad."""
        with np.errstate(over="ignore"):
            stored = values.astype(np.float32)
        if np.isfinite(stored).all():
            return stored
        finite = np.isfinite(values)
        self.require(finite, column, value_of, "is not a finite number")
        beyond = "is beyond float32, in which dense values are kept"
        self.require(np.isfinite(stored) | ~finite, column, value_of, beyond)
        return stored

    def finish(self, skip: bool) -> int:
        """How many rows are bad; ``BadRow`` for the first of them unless ``skip``."""
        if self.worst is not None and not skip:
            index, message = self.worst
            where = self._names[index] if self._names else f"{self.file}, row {self.first_row + index}"
            raise BadRow(f"{where}, {message}")
        return int(len(self.good) - self.good.sum())
