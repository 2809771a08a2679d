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

FULL = 0.75
"""The share of the waiting writes' room from which rows are written, where rows share blocks."""
READ_ROWS = 4096
"""Rows of a group that are read by one call, so that their blocks are still staged for writes after it."""
PIECES = 8
"""How many pieces of the room are written one after the other, each before reads that came meanwhile."""


Rows = NDArray[np.int64]


Found = NDArray[np.bool_]


def positions(rows: NDArray[np.integer], wanted: NDArray[np.integer]) -> tuple[NDArray[np.int64], Found]:
    """For each of ``wanted``, its position in sorted ``rows`` (any, if it is not there) and whether it is
    there."""
    if not len(rows):
        return np.zeros(len(wanted), np.int64), np.zeros(len(wanted), bool)
    at = np.minimum(np.searchsorted(rows, wanted), len(rows) - 1)
    return at, rows[at] == wanted


class Writes:
    """Rows that wait to be written, each with its newest record; at most ``capacity``."""

    def __init__(self, capacity: int, width: int, full: float) -> None:
        self.least = full * capacity
        """From more rows than these on, some are written."""
        self.rows: Rows = np.empty(0, np.int64)
        """Sorted."""
        self.records = np.empty((capacity, width), np.float32)
        self._places = np.empty(0, np.int32)
        """The place of each of ``rows`` in ``records``."""
        self._free = np.arange(capacity, dtype=np.int32)
        self._changed = np.zeros(capacity, bool)
        """Of each place, whether its record is newer than what ``piece`` gave away."""

    def find(self, wanted: Rows) -> tuple[NDArray[np.int32], Found]:
        """Places in ``records`` of those of ``wanted`` that wait, and which these are."""
        at, here = positions(self.rows, wanted)
        return self._places[at[here]], here

    def put(self, rows: Rows, records: Records) -> bool:
        """Add distinct ``rows``, or replace their records; False if there is no room, and nothing is done."""
        places, here = self.find(rows)
        new = np.flatnonzero(~here)
        if len(new) > len(self._free):
            return False
        self.records[places] = records[here]
        self._changed[places] = True
        new = new[np.argsort(rows[new])]
        fresh, self._free = self._free[: len(new)], self._free[len(new) :]
        self.records[fresh] = records[new]
        self._changed[fresh] = True
        at = np.searchsorted(self.rows, rows[new])
        self.rows = np.insert(self.rows, at, rows[new])
        self._places = np.insert(self._places, at, fresh)
        return True

    def piece(self, first: int) -> Rows:
        """The next rows to write, from number ``first`` on, or else from the start."""
        start = int(np.searchsorted(self.rows, first)) % max(1, len(self.rows))
        return self.rows[start : start + max(1, len(self.records) // PIECES)]

    def between(self, first: int, last: int) -> Rows:
        """Those of numbers ``first`` to ``last``."""
        return self.rows[np.searchsorted(self.rows, first) : np.searchsorted(self.rows, last, "right")]

    def give(self, rows: Rows) -> Records:
        """The records of waiting ``rows``, to be written; ``written`` follows."""
        places, _ = self.find(rows)
        self._changed[places] = False
        return self.records[places]

    def written(self, rows: Rows) -> None:
        """Drop ``rows`` that were given and have been written, but for those that changed meanwhile."""
        at, _ = positions(self.rows, rows)
        at = at[~self._changed[self._places[at]]]
        self._free = np.concatenate((self._free, self._places[at]))
        self.rows, self._places = np.delete(self.rows, at), np.delete(self._places, at)

    @property
    def full(self) -> bool:
        """Whether it is time to write some."""
        return len(self.rows) > self.least

    @property
    def nbytes(self) -> int:
        """Its memory."""
        parts = (self.records, self.rows, self._places, self._free, self._changed)
        return sum(part.nbytes for part in parts)


@dataclass
class ReadGroup:
    """Rows that are read ahead together, sorted, and their records once they have arrived."""

    rows: Rows
    records: Records | None = None
    done: Future[None] = field(default_factory=Future)


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
        try:
            with self._using:
                records = np.empty((len(group.rows), self.layout.width), np.float32)
                with self._lock:
                    cold = np.flatnonzero(~self._take_waiting(group.rows, records))
                before = replace(self.inner.io)
                size = READ_ROWS if self.inner.shares_blocks else max(1, len(cold))
                for part in np.split(cold, range(size, len(cold), size)):
                    self._read_part(group.rows, part, records)
                self._background = self._background.plus(self.inner.io.plus(before, -1))
                with self._lock:
                    # What was replaced meanwhile is among the waiting writes: this thread writes, and after
                    # a part it has taken over what it wrote.
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
                coming = None
                for group in self._groups.values():
                    at, here = positions(group.rows, rows[left])
                    if not here.any():
                        continue
                    if group.records is None:
                        coming = group
                        break
                    out[left[here]] = group.records[at[here]]
                    left = left[~here]
            if coming is None:
                break
            began = time.perf_counter()
            coming.done.exception()
            self.waited += time.perf_counter() - began
        if not len(left):
            return
        # Rows that were not announced come from the store.
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

    def _take_waiting(self, rows: Rows, out: Records) -> Found:
        """Copy the records of ``rows`` that wait to be written into ``out``; returns which these are."""
        places, here = self._waiting.find(rows)
        out[here] = self._waiting.records[places]
        return here

    # -- writing -----------------------------------------------------------------------------

    def scatter(self, rows: Rows, records: Records) -> None:
        """Keep ``records`` until there are enough to write; they replace waiting records of the same rows."""
        with self._lock:
            self._raise_faults()
        if self.rounded is not None:  # rounded at once: what is read must not depend on when it is written
            records = self.rounded(records)
        if self.single:  # what waits already goes on waiting, and the rest is written now
            with self._using:  # no group is being read, so all have arrived or will see what is written here
                with self._lock:
                    _, waits = self._waiting.find(rows)
                before = replace(self.inner.io)
                self.inner.scatter(rows[~waits], records[~waits])
                self.io = self.io.plus(self.inner.io.plus(before, -1))
                with self._lock:
                    self._refresh_groups(rows[~waits], records[~waits])
            rows, records = rows[waits], records[waits]
        size = len(self._waiting.records)
        for start in range(0, len(rows), size):
            self._keep(rows[start : start + size], records[start : start + size])

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
        try:
            with self._using:
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
        if self._waiting.full:
            self._write_more()

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
        held = self._waiting.nbytes
        for group in self._groups.values():
            held += group.rows.nbytes + (0 if group.records is None else group.records.nbytes)
        self.peak_bytes = max(self.peak_bytes, held)

    @property
    def cold_bytes(self) -> int:
        """Bytes of the records in the store."""
        return self.inner.cold_bytes

    @property
    def overhead_bytes(self) -> int:
        """The store's own overhead, and the most that groups and waiting writes took."""
        return self.inner.overhead_bytes + self.peak_bytes
