"""A cold store with bulk transfers: rows are read for a group of batches in advance, and written back
together.

A batch needs a few thousand rows scattered over all blocks of the store. The sorted rows of many batches
share blocks or are in adjacent ones, which the ssd store merges into large requests. A caller that knows what
future batches need announces it, and a thread reads it into host memory while training goes on. Writes wait
in host memory. Where rows share blocks, a row that waits is written when the block around it has just been
read for a group; if the waiting rows come near their room, the thread also passes over them in the order of
the rows, again and again, like an elevator: where it comes by, a whole round's rows have gathered. Where
waiting saves nothing, rows are written as soon as there are enough for a call.

Every call sees the newest record: it looks first among waiting writes, then in what was read ahead, then in
the store. Memory grows with the rows on their way, not with the tables: rows are found by binary search.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from recpipe.plugin import ColdStore, IoCounters, Records
from recpipe_bagpipe.writes import PIECES, Found, Rows, Writes, positions

FULL = 0.75
"""The share of the waiting writes' room from which rows are written, where rows share blocks."""
READ_ROWS = 4096
"""Rows of a group that are read by one call, so that their blocks are still staged for writes after it."""


@dataclass
class ReadGroup:
    """Rows that are read ahead together, sorted, and their records once they have arrived."""

    rows: Rows
    records: Records | None = None
    done: Future[None] = field(default_factory=Future)

    @property
    def nbytes(self) -> int:
        """Its memory."""
        return self.rows.nbytes + (0 if self.records is None else self.records.nbytes)


class BulkStore(ColdStore):
    """``inner`` behind bulk reads (``announce``) and bulk writes.

    Args:
        inner: the store itself. Owned: ``close`` closes it.
        write_rows: how many rows wait in memory at most.
    """

    def __init__(self, inner: ColdStore, write_rows: int) -> None:
        self.inner = inner
        self.layout = inner.layout
        self.direct = inner.direct
        self.rounded, self.rounded_there = inner.rounded, inner.rounded_there
        self.io = IoCounters()
        self.single = False
        """Whether rows are read and written batch by batch: nothing is announced, and no more writes wait."""
        self.missed = 0
        """How many rows ``gather`` had to read itself while others were announced."""
        self.waited = 0.0
        """Seconds that calls waited for groups being read and for room for writes."""
        self.announced = 0
        """How many groups were announced."""
        self.announced_rows = 0
        """How many rows they had."""
        self.peak_bytes = 0
        """The most host memory that groups and waiting writes took, in bytes."""
        self._background = IoCounters()
        self._using = threading.Lock()
        """Held while ``inner`` is used; ``_lock`` may be taken meanwhile, never the other way round."""
        self._lock = threading.RLock()
        self._thread = ThreadPoolExecutor(1, "recpipe-bulk")
        self._groups: dict[int, ReadGroup] = {}
        full = FULL if inner.shares_blocks else 1 / PIECES
        self._waiting = Writes(max(1, write_rows), self.layout.width, full)
        self._next_row = 0
        """Where the next piece of waiting writes begins."""
        self._writing: Future[None] | None = None

    # -- reading -----------------------------------------------------------------------------

    def announce(self, rows: Rows) -> int:
        """Start reading distinct ``rows``; returns at once, with the group's number for ``retire``.

        Later ``gather`` calls find the rows here.
        """
        made = ReadGroup(np.sort(rows))
        with self._lock:
            self._raise_faults()
            number = self.announced
            self.announced += 1
            self.announced_rows += len(rows)
            self._groups[number] = made
        self._thread.submit(self._read, made)
        return number

    def retire(self, number: int) -> None:
        """Forget a group, unless that has happened already: its batches have fetched their rows."""
        with self._lock:
            self._groups.pop(number, None)

    def _read(self, group: ReadGroup) -> None:
        with self._using:
            self._read_group(group)

    def _read_group(self, group: ReadGroup) -> None:
        try:
            records = np.empty((len(group.rows), self.layout.width), np.float32)
            with self._lock:
                cold = np.flatnonzero(~self._take_waiting(group.rows, records))
            before = replace(self.inner.io)
            size = READ_ROWS if self.inner.shares_blocks else max(1, len(cold))
            for part in np.split(cold, range(size, len(cold), size)):
                self._read_part(group.rows, part, records)
            self._background = self._background.plus(self.inner.io.plus(before, -1))
            with self._lock:
                # What was replaced meanwhile is among the waiting writes: this thread writes, and after a
                # part it has taken over what it wrote.
                self._take_waiting(group.rows, records)
                group.records = records
                self._count_memory()
            group.done.set_result(None)
        except BaseException as fault:
            group.done.set_exception(fault)

    def _read_part(self, rows: Rows, part: NDArray[np.int64], records: Records) -> None:
        """Read the sorted rows ``rows[part]`` into ``records[part]``, and write what waits in the blocks
        around them."""
        if not len(part):
            return
        came = np.empty((len(part), self.layout.width), np.float32)
        self.inner.gather(rows[part], came)
        records[part] = came
        span = slice(part[0], part[-1] + 1)
        with self._lock:
            # A row that is written now is not among the waiting writes any more when the group arrives.
            self._take_waiting(rows[span], records[span])
            waiting = self._waiting.between(rows[part[0]], rows[part[-1]])
            waiting = waiting[self.inner.staged(waiting)]
            newest = self._waiting.give(waiting)
        if len(waiting):
            self.inner.scatter(waiting, newest)
            with self._lock:
                self._waiting.written(waiting)

    def gather(self, rows: Rows, out: Records) -> None:
        """The newest records of ``rows``; waits for groups that will bring some of them."""
        while True:
            with self._lock:
                self._raise_faults()
                left = np.flatnonzero(~self._take_waiting(rows, out))
                group, left = self._take_ahead(rows, left, out)
            if group is None:
                break
            began = time.perf_counter()
            group.done.exception()
            self.waited += time.perf_counter() - began
        if len(left):
            self._gather_now(rows, left, out)

    def _take_waiting(self, rows: Rows, out: Records) -> Found:
        """Copy the records of ``rows`` that wait to be written into ``out``; returns which these are."""
        places, here = self._waiting.find(rows)
        out[here] = self._waiting.records[places]
        return here

    def _take_ahead(self, rows: Rows, left: Rows, out: Records) -> tuple[ReadGroup | None, Rows]:
        """Copy the records that groups have of ``rows[left]`` into ``out``.

        Returns a group that will bring some of them and has not arrived yet, or None, and what is left.
        """
        for group in self._groups.values():
            at, here = positions(group.rows, rows[left])
            if not here.any():
                continue
            if group.records is None:
                return group, left
            out[left[here]] = group.records[at[here]]
            left = left[~here]
        return None, left

    def _gather_now(self, rows: Rows, left: NDArray[np.int64], out: Records) -> None:
        """Read rows that were not announced from the store."""
        whole = len(left) == len(rows)
        records = out if whole else np.empty((len(left), self.layout.width), np.float32)
        with self._using:
            before = replace(self.inner.io)
            self.inner.gather(rows if whole else rows[left], records)
            self.io = self.io.plus(self.inner.io.plus(before, -1))
        if not whole:
            out[left] = records
        if not self.single:
            self.missed += len(left)

    # -- writing -----------------------------------------------------------------------------

    def scatter(self, rows: Rows, records: Records) -> None:
        """Keep ``records`` until there are enough to write; they replace waiting records of the same rows."""
        with self._lock:
            self._raise_faults()
        if self.rounded is not None:  # rounded at once: what is read must not depend on when it is written
            records = self.rounded(records)
        if self.single:
            rows, records = self._scatter_now(rows, records)
        size = len(self._waiting.records)
        for start in range(0, len(rows), size):
            self._keep(rows[start : start + size], records[start : start + size])

    def _scatter_now(self, rows: Rows, records: Records) -> tuple[Rows, Records]:
        """Write ``rows`` to the store, but for those that wait to be written, which are returned."""
        with self._using:  # no group is being read, so all have arrived or will see what is written here
            with self._lock:
                _, waits = self._waiting.find(rows)
            before = replace(self.inner.io)
            self.inner.scatter(rows[~waits], records[~waits])
            self.io = self.io.plus(self.inner.io.plus(before, -1))
            with self._lock:
                self._refresh_groups(rows[~waits], records[~waits])
        return rows[waits], records[waits]

    def _keep(self, rows: Rows, records: Records) -> None:
        while True:
            with self._lock:
                if self._waiting.put(rows, records):
                    self._refresh_groups(rows, records)
                    self._count_memory()
                    if self._waiting.full:
                        self._write_more()
                    return
                writing = self._write_more()
            began = time.perf_counter()
            writing.result()
            self.waited += time.perf_counter() - began

    def _refresh_groups(self, rows: Rows, records: Records) -> None:
        """Replace records that were read ahead. A group being read takes over waiting writes when it
        arrives."""
        for group in self._groups.values():
            if group.records is not None:
                at, here = positions(group.rows, rows)
                group.records[at[here]] = records[here]

    def _write_more(self) -> Future[None]:
        """Have the thread write a piece, unless it is about to; returns when that is done."""
        with self._lock:
            if self._writing is None or self._writing.done():
                self._writing = Future()
                self._thread.submit(self._write, self._writing)
            return self._writing

    def _write(self, done: Future[None]) -> None:
        """Write a piece; if there is more to write, queue it after reads that came meanwhile."""
        with self._using:
            self._write_piece(done)
        if done.exception() is None and self._waiting.full:
            self._write_more()

    def _write_piece(self, done: Future[None]) -> None:
        try:
            with self._lock:
                rows = self._waiting.piece(self._next_row)
                records = self._waiting.give(rows)
            before = replace(self.inner.io)
            self.inner.scatter(rows, records)
            self._background = self._background.plus(self.inner.io.plus(before, -1))
            with self._lock:
                self._waiting.written(rows)
                self._next_row = int(rows[-1]) + 1 if len(rows) else 0
        except BaseException as fault:
            done.set_exception(fault)
            return
        done.set_result(None)

    def _write_all(self) -> None:
        self._raise_faults()
        while len(self._waiting.rows):
            self._write_more().result()

    # -- the rest ----------------------------------------------------------------------------

    def background(self) -> IoCounters:
        """Traffic of bulk reads and writes."""
        return self._background

    def _raise_faults(self) -> None:
        """Raise the error of a read or a write that failed in the thread."""
        for group in self._groups.values():
            if group.done.done():
                group.done.result()
        if self._writing is not None and self._writing.done():
            self._writing.result()

    def flush(self) -> None:
        """Write everything that waits, and make it as durable as the store makes it."""
        self._write_all()
        with self._using:
            self.inner.flush()

    def close(self) -> None:
        """Write everything that waits and close the store. Calling it again does nothing."""
        try:
            self._write_all()
        finally:
            self._thread.shutdown(wait=True)
            self.inner.close()

    def _count_memory(self) -> None:
        held = sum(group.nbytes for group in self._groups.values())
        self.peak_bytes = max(self.peak_bytes, held + self._waiting.nbytes)

    @property
    def cold_bytes(self) -> int:
        """Bytes of the records in the store."""
        return self.inner.cold_bytes

    @property
    def overhead_bytes(self) -> int:
        """The store's own overhead, and the most that groups and waiting writes took."""
        return self.inner.overhead_bytes + self.peak_bytes
