"""Many block reads or writes at once by Linux native AIO, without a compiler and without Python work per
request.

The control blocks of a batch are one numpy array, so a call costs a few system calls per queue depth
(``io_submit(2)``, ``io_getevents(2)``). If the kernel does not offer AIO, and for files behind the page cache
(for which AIO is synchronous), a small pool of threads does the same; ``engine`` tells which.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
import sys
import time
from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger(__name__)

# io_setup, io_destroy, io_getevents, io_submit
SYSCALLS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
IOCB_CMD_PREAD, IOCB_CMD_PWRITE = 0, 1
IOCB = np.dtype(
    [
        ("data", "<u8"),
        ("key", "<u4"),
        ("rw_flags", "<i4"),
        ("opcode", "<u2"),
        ("priority", "<i2"),
        ("fd", "<u4"),
        ("buffer", "<u8"),
        ("bytes", "<u8"),
        ("offset", "<i8"),
        ("reserved", "<u8"),
        ("flags", "<u4"),
        ("eventfd", "<u4"),
    ]
)
IO_EVENT = np.dtype([("data", "<u8"), ("iocb", "<u8"), ("result", "<i8"), ("result2", "<i8")])
Engine = Literal["aio", "threads"]
POOL_THREADS = 8


@dataclass(frozen=True)
class Requests:
    """A batch of transfers between files and one buffer; arrays of one length n.

    ``fds`` int64; ``offsets`` int64, bytes into the file; ``positions`` int64, bytes into the
    buffer; ``lengths`` int64, bytes.
    """

    fds: NDArray[np.int64]
    offsets: NDArray[np.int64]
    positions: NDArray[np.int64]
    lengths: NDArray[np.int64]


class RequestError(Exception):
    """Request ``index`` failed with ``code`` (an errno; 0: the file ended, or took no more bytes)."""

    def __init__(self, index: int, code: int) -> None:
        super().__init__(index, code)
        self.index = index
        self.code = code


class BlockTransfer(ABC):
    """Moves a batch of requests. A batch is in flight at a time."""

    engine: Engine

    def run(self, requests: Requests, buffer: NDArray[np.uint8], *, write: bool) -> None:
        """Return when every byte has been moved; RequestError for the first request that failed.

        When this returns or raises, no request is in flight, so that the caller may use the buffer again.
        """
        self.start(requests, buffer, write=write)
        self.finish()

    @abstractmethod
    def start(self, requests: Requests, buffer: NDArray[np.uint8], *, write: bool) -> None:
        """The first half of ``run``: begin, and return. If this raises, no request is in flight."""

    @abstractmethod
    def finish(self) -> None:
        """The second half: wait for what ``start`` began."""

    @abstractmethod
    def close(self) -> None:
        """Release the kernel's queue or the threads."""


def open_transfer(depth: int, *, direct: bool) -> BlockTransfer:
    """Native AIO with ``depth`` requests in flight for O_DIRECT files if it is available, otherwise
    threads."""
    if direct and sys.platform == "linux" and platform.machine() in SYSCALLS:
        try:
            return NativeAio(depth)
        except OSError as error:  # a sandbox forbids it, the kernel lacks it, or fs.aio-max-nr is used up
            log.warning(
                "no native AIO here (io_setup: %s): the ssd store uses threads, which cost CPU", error
            )
    return ThreadedIo()


class NativeAio(BlockTransfer):
    """A kernel AIO context of ``depth`` requests. OSError if ``io_setup`` is refused."""

    engine = "aio"

    def __init__(self, depth: int) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._at_once = ctypes.PyDLL(None, use_errno=True)
        self._setup, self._destroy, self._getevents, self._submit = SYSCALLS[platform.machine()]
        self._depth = depth
        self._events = np.zeros(depth, IO_EVENT)
        self._wanted = ctypes.c_long(depth), ctypes.c_void_p(self._events.ctypes.data)
        self._make_room(depth)
        self._pending = self._numbers[:0]
        self._open()

    def _make_room(self, count: int) -> None:
        """Control blocks for so many requests, which later calls use again."""
        self._room = np.zeros(count, IOCB)
        self._room["data"] = self._numbers = np.arange(count)
        self._all_pointers = (self._room.ctypes.data + self._numbers * IOCB.itemsize).astype(np.uint64)

    def _open(self) -> None:
        self._context = ctypes.c_ulong(0)
        self._call(self._setup, ctypes.c_ulong(self._depth), ctypes.byref(self._context))

    def start(self, requests: Requests, buffer: NDArray[np.uint8], *, write: bool) -> None:
        """See ``BlockTransfer.start``. Requests beyond the depth begin in ``finish``."""
        count = len(requests.fds)
        if count > len(self._room):
            self._make_room(count)
        blocks = self._room[:count]
        blocks["opcode"] = IOCB_CMD_PWRITE if write else IOCB_CMD_PREAD
        blocks["fd"] = requests.fds
        blocks["buffer"] = requests.positions + buffer.ctypes.data
        blocks["bytes"] = requests.lengths
        blocks["offset"] = requests.offsets
        self._blocks, self._results = blocks, np.zeros(count, np.int64)
        self._pending, self._pointers = self._numbers[:count], self._all_pointers[:count]
        self._submitted = self._done = 0
        self._go_on(finish=False)

    def finish(self) -> None:
        self._go_on(finish=True)

    def _go_on(self, finish: bool) -> None:
        """Submit as many requests as the depth allows; with ``finish``, until all bytes have been moved."""
        try:
            while len(self._pending):
                self._submit_more()
                if not finish:
                    return
                for at_least in (0, self._depth // 4 or 1):  # what has come already, then what is to come
                    flying = self._submitted - self._done
                    if not flying:
                        break
                    least = ctypes.c_long(min(at_least, flying))
                    try:
                        came = self._call(
                            *(self._getevents, self._context, least, *self._wanted, None), waits=at_least > 0
                        )
                    except InterruptedError:
                        continue
                    events = self._events[:came]
                    self._results[events["data"].astype(np.int64)] = events["result"]
                    self._done += came
                if self._done == len(self._pending):
                    # Another pass over what was moved only in part.
                    self._pending = _remainders(self._blocks, self._pending, self._results)
                    self._pointers = self._all_pointers[self._pending]
                    self._submitted = self._done = 0
        except BaseException:
            # Also after Ctrl-C: the kernel owns the buffer until every request has completed, and closing
            # waits for them.
            self.close()
            self._pending = self._numbers[:0]
            self._open()
            raise

    def _submit_more(self) -> None:
        flying, first = self._submitted - self._done, self._submitted
        room = min(self._depth - flying, len(self._pending) - first)
        if not room:
            return
        address = ctypes.c_void_p(self._pointers.ctypes.data + 8 * first)
        try:
            self._submitted += self._call(self._submit, self._context, ctypes.c_long(room), address)
        except OSError as error:
            if error.errno == errno.EAGAIN:  # the kernel has no free slots: collect what is in flight first
                if not flying:
                    time.sleep(0.001)
            elif error.errno != errno.EINTR:
                raise RequestError(int(self._pending[first]), error.errno or errno.EIO) from error

    def _call(self, number: int, *arguments: object, waits: bool = True) -> int:
        # What does not wait keeps Python's lock: in a server, others would have it for a while.
        library = self._libc if waits else self._at_once
        result = int(library.syscall(ctypes.c_long(number), *arguments))
        if result < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return result

    def close(self) -> None:
        """Return the context to the kernel."""
        if self._context.value:
            self._call(self._destroy, self._context)
            self._context = ctypes.c_ulong(0)


def _remainders(
    blocks: NDArray[np.void], pending: NDArray[np.int64], results: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Check the results of ``pending``; return the short transfers, reduced to their remainder."""
    if len(pending) == len(results) and (results == blocks["bytes"]).all():
        return pending[:0]
    moved = results[pending]
    short = moved != blocks["bytes"][pending].astype(np.int64)
    left: NDArray[np.int64] = pending[short]
    moved = moved[short]
    again = (moved == -errno.EAGAIN) | (moved == -errno.EINTR)
    failed = np.flatnonzero((moved <= 0) & ~again)
    if len(failed):
        raise RequestError(int(left[failed[0]]), -int(moved[failed[0]]))
    gained = np.where(again, 0, moved)
    blocks["buffer"][left] += gained.astype(np.uint64)
    blocks["offset"][left] += gained
    blocks["bytes"][left] -= gained.astype(np.uint64)
    return left


class ThreadedIo(BlockTransfer):
    """``preadv`` and ``pwritev`` in a few threads, each of which moves a part of the batch."""

    engine = "threads"

    def __init__(self, threads: int = POOL_THREADS) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="recpipe-store")
        self._threads = threads
        self._futures: list[Future[None]] = []

    def start(self, requests: Requests, buffer: NDArray[np.uint8], *, write: bool) -> None:
        strips = np.array_split(np.arange(len(requests.fds)), min(self._threads, max(1, len(requests.fds))))
        self._futures = [self._pool.submit(_move, requests, strip, buffer.data, write) for strip in strips]

    def finish(self) -> None:
        futures, self._futures = self._futures, []
        try:
            errors = [error for future in futures if (error := future.exception())]
        finally:
            wait(futures)
        if errors:
            raise errors[0]

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def _move(requests: Requests, strip: NDArray[np.int64], buffer: memoryview, write: bool) -> None:
    move = os.pwritev if write else os.preadv
    columns = (requests.fds, requests.offsets, requests.positions, requests.lengths)
    rows = zip(*(column[strip].tolist() for column in columns), strict=True)
    for index, (fd, offset, position, length) in zip(strip.tolist(), rows, strict=True):
        done = 0
        while done < length:
            try:
                moved = move(fd, [buffer[position + done : position + length]], offset + done)
            except OSError as error:
                raise RequestError(index, error.errno or errno.EIO) from error
            if moved == 0:
                raise RequestError(index, 0)
            done += moved
