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
COUNTED = 1 << 16
"""Bytes that are compared at a time: what comes of it stays in the nearest caches."""
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
) -> Iterator[tuple[memoryview, float]]:
    """Blocks of whole records of a plain or packed text file in UTF-8, with the share read so far. With a
    ``quote``, a line's end between two of them is within a record. ``start``: the byte of a plain file after
    whose line they begin. ``size``: about how many bytes each has, if it is not ``BLOCK_BYTES``."""
    total, rest, size = max(1, size_of(file.path)), b"", size or BLOCK_BYTES
    rooms = _Rooms()
    try:
        with opened(file.path) as raw:
            packed = PACKED.get(file.path.suffix)
            stream = pa.CompressedInputStream(raw, packed) if packed else raw
            first = True
            if start:
                stream.seek(start)
            read = _in_utf8(file, stream)
            while True:
                room, begin = rooms.take(len(rest) + size), 0
                room[: len(rest)] = rest
                read_so_far = read(memoryview(room)[len(rest) : len(rest) + size])
                if not read_so_far:
                    break
                stop = len(rest) + read_so_far
                if first:
                    begin = room.find(b"\n", 0, stop) + 1 if start else _mark_of(file, room)
                    first = False
                end = _last_end(room, quote, begin, stop)
                if end > begin:
                    yield memoryview(room)[begin:end], min(1.0, raw.tell() / total)
                    begin = end
                rest = bytes(memoryview(room)[begin:stop])
                if len(rest) > LONGEST * BLOCK_BYTES:
                    raise DataError(
                        f"{file}: a line of more than {LONGEST * BLOCK_BYTES:,} bytes; is this a text file?"
                    )
    except (OSError, EOFError) as error:
        why = f"cannot be read ({error}); fetch or pack the file again"
        if "runcated" in str(error):
            why = "the archive is truncated; fetch or pack the file again (data.on_bad_row does not apply)"
        raise DataError(f"{file}: {why}") from error
    if rest:
        yield memoryview(rest + b"\n"), 1.0


class _Rooms:
    """Memory for one block after the other, which is used again once nobody holds the block that was in it:
    for new memory the system takes as long as for reading."""

    def __init__(self) -> None:
        self._rooms: list[bytearray] = []

    def take(self, size: int) -> bytearray:
        """So many bytes, or more."""
        self._rooms = [room for room in self._rooms if len(room) >= size]
        free = next(filter(_is_free, self._rooms), None)
        if free is None:
            self._rooms.append(free := bytearray(size + size // 8))
        return free


def _is_free(room: bytearray) -> bool:
    """Whether nobody holds some of it: then, and only then, its length may change."""
    try:
        room.append(room.pop())
    except BufferError:
        return False
    return True


def _in_utf8(file: InputFile, stream: pa.NativeFile) -> Callable[[memoryview], int]:
    """Writes what comes next of a stream's text into memory, in UTF-8, and says how many bytes that are: 0
    if there is no more. A character may begin in one piece and end in the next."""
    codec = file.rules.encoding.lower().replace("_", "-")
    if codec in ("utf-8", "utf8", "ascii"):
        return lambda room: int(stream.readinto(room))
    try:
        " ".encode(codec)  # which, unlike the next line, refuses codecs that are not of text
        decoder = codecs.getincrementaldecoder(codec)()
    except LookupError as fault:
        raise DataError(
            f"{file}: no encoding is called {shown(file.rules.encoding)}; correct data.encoding"
        ) from fault
    waiting = b""

    def read(room: memoryview) -> int:
        nonlocal waiting
        more = True
        while more and not waiting:
            data = stream.read(len(room))
            more = bool(data)
            try:
                waiting = decoder.decode(data, not more).encode()
            except UnicodeError as fault:
                raise DataError(
                    f"{file}: is not text in {file.rules.encoding} ({shown(fault, 200)}); pass data.encoding="
                ) from fault
        size = min(len(room), len(waiting))
        room[:size], waiting = waiting[:size], waiting[size:]
        return size

    return read


def _mark_of(file: InputFile, text: bytearray) -> int:
    """How many bytes the mark of UTF-8 has with which ``text`` begins; ``DataError`` for that of UTF-16, and
    of what is no text."""
    for mark, what in NO_TEXT.items():
        if text.startswith(mark):
            raise DataError(f"{file}: is {what}")
    if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(f"{file}: begins as text in UTF-16 does; pass data.encoding=utf-16")
    return len(codecs.BOM_UTF8) * text.startswith(codecs.BOM_UTF8)


def _last_end(data: bytearray, quote: bytes | None, begin: int, end: int) -> int:
    """Where the last whole record ends that is in ``data`` from ``begin`` on, where one begins, to ``end``;
    0 or ``begin``: there is none."""
    end = data.rfind(b"\n", begin, end) + 1
    if quote is None:
        return end
    inside = count_of(data, quote, begin, end) % 2 == 1
    while end and inside:
        opening = data.rfind(quote, begin, end)  # before it, there is an even number of them
        end = data.rfind(b"\n", begin, max(begin, opening)) + 1
        inside = count_of(data, quote, end, opening) % 2 == 1
    return end


def count_of(data: bytearray | memoryview, byte: bytes, low: int, high: int) -> int:
    """How often ``byte`` is in ``data`` from ``low`` to ``high``; ``bytes.count`` would stop at each."""
    whole = np.frombuffer(data, np.uint8)[low:high]
    pieces = range(0, len(whole), COUNTED)
    return sum(int(np.count_nonzero(whole[at : at + COUNTED] == ord(byte))) for at in pieces)


def made_ahead(
    make: Callable[[Item], Made], items: Iterator[Item], name: str, at_once: bool = False
) -> Iterator[tuple[Item, Future[Made]]]:
    """``items`` in order, with what ``make`` makes of each. While the reader works on one, threads called
    ``name`` make the next ones. The first is made when it is asked for, without any, for it may be all of a
    file; ``at_once``: that is known not to be so.

    What ``items`` raises comes behind those before it.
    """
    threads = min(MOST_THREADS, pa.cpu_count())
    pool, waiting = ThreadPoolExecutor(threads, name), deque[tuple[Item, Future[Made]]]()
    ahead = threads if at_once else 0
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
