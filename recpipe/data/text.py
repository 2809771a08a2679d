"""The text of files, plain or packed, in blocks of whole records and in UTF-8."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from recpipe.data.remote import opened, size_of
from recpipe.errors import DataError, shown

if TYPE_CHECKING:
    from recpipe.data.records import InputFile

Item = TypeVar("Item")
Made = TypeVar("Made")
PACKED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
NO_TEXT = {
    b"PK\x03\x04": "a zip archive, as .xlsx files are: unpack it, or save its sheet as CSV",
    b"\x1f\x8b": "packed by gzip: name it .gz",
    b"\x28\xb5\x2f\xfd": "packed by zstd: name it .zst",
    b"BZh91AY&SY": "packed by bzip2: name it .bz2",
    b"PAR1": "Parquet: pass data.format=parquet",
    b"ARROW1": "Arrow: pass data.format=arrow",
}
"""How files begin that are no text, whatever their names say."""
BLOCK_BYTES = 4 << 20
"""Of text, parsed at a time: larger ones do not stay in a core's cache."""
LONGEST = 8
"""Blocks, of which a line may not take more."""
MOST_THREADS = 4
"""Which parse blocks at the same time, each with one or two blocks in memory."""
READ_FAULTS = (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError)
"""The errors that pyarrow raises for damaged files, including damaged names and sizes."""


class Block(NamedTuple):
    """Rows of a file: the number of the first one (from 1), and the share of the file read so far."""

    first_row: int
    rows: pa.RecordBatch
    share: float
    left_out: int = 0
    """How many bad rows are not among them."""


def text_blocks(
    file: InputFile, quote: bytes | None = None, start: int = 0, size: int | None = None
) -> Iterator[tuple[bytes, float]]:
    """Blocks of whole records of a plain or packed text file in UTF-8, with the share read so far. With a
    ``quote``, a line's end between two of them is within a record. ``start``: the byte of a plain file after
    whose line they begin. ``size``: about how many bytes each has, if it is not ``BLOCK_BYTES``."""
    total, rest = max(1, size_of(file.path)), b""
    decode = _decoder(file)
    try:
        with opened(file.path) as raw:
            packed = PACKED.get(file.path.suffix)
            stream = pa.CompressedInputStream(raw, packed) if packed else raw
            first = True
            if start:
                stream.seek(start)
            while data := stream.read(size or BLOCK_BYTES):
                data = decode(data, False)
                if first:
                    data = data[data.find(b"\n") + 1 :] if start else _without_mark(file, data)
                    first = False
                end = _last_end(data, quote, rest)
                if end:
                    yield b"".join((rest, memoryview(data)[:end])), min(1.0, raw.tell() / total)
                rest = data[end:] if end else rest + data
                if len(rest) > LONGEST * BLOCK_BYTES:
                    raise DataError(
                        f"{file}: a line of more than {LONGEST * BLOCK_BYTES:,} bytes; is this a text file?"
                    )
    except (OSError, EOFError) as error:
        why = f"cannot be read ({error}); fetch or pack the file again"
        if "runcated" in str(error):
            why = "the archive is truncated; fetch or pack the file again (data.on_bad_row does not apply)"
        raise DataError(f"{file}: {why}") from error
    if rest := rest + decode(b"", True):
        yield rest + b"\n", 1.0


def _decoder(file: InputFile) -> Callable[[bytes, bool], bytes]:
    """Makes UTF-8 of text block by block; a character may begin in one and end in the next. The second
    argument says that there is no more."""
    codec = file.rules.encoding.lower().replace("_", "-")
    if codec in ("utf-8", "utf8", "ascii"):
        return lambda data, _: data
    try:
        " ".encode(codec)  # which, unlike the next line, refuses codecs that are not of text
        decoder = codecs.getincrementaldecoder(codec)()
    except LookupError as fault:
        raise DataError(
            f"{file}: no encoding is called {shown(file.rules.encoding)}; correct data.encoding"
        ) from fault

    def decode(data: bytes, final: bool) -> bytes:
        try:
            return decoder.decode(data, final).encode()
        except UnicodeError as fault:
            raise DataError(
                f"{file}: is not text in {file.rules.encoding} ({shown(fault, 200)}); pass data.encoding="
            ) from fault

    return decode


def _without_mark(file: InputFile, data: bytes) -> bytes:
    """The beginning of a text without its byte order mark; ``DataError`` for that of UTF-16, and of what is
    no text."""
    for mark, what in NO_TEXT.items():
        if data.startswith(mark):
            raise DataError(f"{file}: is {what}")
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(f"{file}: begins as text in UTF-16 does; pass data.encoding=utf-16")
    return data.removeprefix(codecs.BOM_UTF8)


def _last_end(data: bytes, quote: bytes | None, rest: bytes = b"") -> int:
    """Where the last whole record ends; 0: there is none. ``rest``: of a record that goes on in ``data``."""
    end = data.rfind(b"\n") + 1
    if quote is None:
        return end
    inside = (rest.count(quote) + _count(data, quote, 0, end)) % 2 == 1
    while end and inside:
        opening = data.rfind(quote, 0, end)  # before it, there is an even number of them
        end = data.rfind(b"\n", 0, max(0, opening)) + 1
        inside = _count(data, quote, end, opening) % 2 == 1
    return end


def _count(data: bytes, byte: bytes, low: int, high: int) -> int:
    """As ``data.count``, which is slow where there are many of them."""
    return int(np.count_nonzero(np.frombuffer(data, np.uint8, max(0, high - low), low) == ord(byte)))


def made_ahead(
    make: Callable[[Item], Made], items: Iterator[Item], name: str
) -> Iterator[tuple[Item, Future[Made]]]:
    """``items`` in order, with what ``make`` makes of each. While the reader works on one, threads called
    ``name`` make the next ones. The first is made when it is asked for, without any: it may be all of a file.

    What ``items`` raises comes behind those before it.
    """
    threads = min(MOST_THREADS, pa.cpu_count())
    pool, waiting = ThreadPoolExecutor(threads, name), deque[tuple[Item, Future[Made]]]()
    ahead = 0
    fault: Exception | None = None
    try:
        try:
            for item in items:
                waiting.append((item, pool.submit(make, item) if ahead else made(make, item)))
                if len(waiting) > ahead:
                    yield waiting.popleft()
                    ahead = min(threads, ahead + 1)
        except Exception as own:
            fault = own
        yield from waiting
        if fault is not None:
            raise fault
    finally:
        pool.shutdown(cancel_futures=True)


def made(make: Callable[[Item], Made], item: Item) -> Future[Made]:
    """What ``make`` makes of ``item``, in this thread; what it raises comes when it is asked for."""
    future = Future[Made]()
    try:
        future.set_result(make(item))
    except Exception as fault:
        future.set_exception(fault)
    return future
