"""A cold store with bulk transfers: rows are read for a group of batches in advance, and written back
together.

A batch needs a few thousand rows scattered over all blocks of the store. The sorted rows of many batches
share blocks or are in adjacent ones, which the ssd store merges into large requests. A caller that knows what
future batches need announces it, and a thread reads it into host memory while training goes on. Writes wait
in host memory until there are enough of them.

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

from recpipe.tables.stores.base import ColdStore, IoCounters, Records, Rows

WRITE_ROWS = 4096
"""How many rows of a lot are written before a waiting read has its turn."""
Found = NDArray[np.bool_]


def positions(rows: Rows, wanted: Rows) -> tuple[Rows, Found]:
    """For each of ``wanted``, its position in sorted ``rows`` (any, if it is not there) and whether it is
    there."""
    if not len(rows):
        return np.zeros(len(wanted), np.int64), np.zeros(len(wanted), bool)
    at = np.minimum(np.searchsorted(rows, wanted), len(rows) - 1)
    return at, rows[at] == wanted


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


class Writes:
    """Rows that wait to be written, each with its newest record; at most ``capacity``."""

    def __init__(self, capacity: int, width: int) -> None:
        self.rows: Rows = np.empty(0, np.int64)
        """Sorted."""
        self.records = np.empty((capacity, width), np.float32)
        self.written = 0
        """How many of ``rows``, from the first on, the store already has."""
        self._places = np.empty(0, np.int32)

    def find(self, wanted: Rows) -> tuple[NDArray[np.int32], Found]:
        """Places in ``records`` of those of ``wanted`` that wait, and which these are."""
        at, here = positions(self.rows, wanted)
        here &= at >= self.written
        return self._places[at[here]], here

    def put(self, rows: Rows, records: Records) -> None:
        """Add distinct ``rows``, or replace their records."""
        places, here = self.find(rows)
        self.records[places] = records[here]
        new = np.flatnonzero(~here)
        new = new[np.argsort(rows[new])]
        at = np.searchsorted(self.rows, rows[new])
        fresh = np.arange(len(self.rows), len(self.rows) + len(new), dtype=np.int32)
        self.records[fresh] = records[new]
        self.rows = np.insert(self.rows, at, rows[new])
        self._places = np.insert(self._places, at, fresh)

    def next(self, count: int) -> tuple[Rows, Records]:
        """Up to ``count`` rows that are to be written next, and their records."""
        part = slice(self.written, self.written + count)
        return self.rows[part], self.records[self._places[part]]

    @property
    def nbytes(self) -> int:
        """Its memory."""
        return self.records.nbytes + self.rows.nbytes + self._places.nbytes


class BulkStore(ColdStore):
    """``inner`` behind bulk reads (``announce``) and bulk writes.

    Args:
        inner: the store itself. Owned: ``close`` closes it.
        write_rows: how many rows wait in memory before they are written. While they are written, so many
            more may wait.
    """

    def __init__(self, inner: ColdStore, write_rows: int) -> None:
        self.inner = inner
        self.layout = inner.layout
        self.direct = inner.direct
        self.rounded = inner.rounded
        self.io = IoCounters()
        self.missed = 0
        """How many rows ``gather`` had to read itself."""
        self.waited = 0.0
        """Seconds that calls waited for groups being read and lots being written."""
        self.announced = 0
        """How many groups were announced."""
        self.announced_rows = 0
        """How many rows they had."""
        self.peak_bytes = 0
        """The most host memory that groups and waiting writes took, in bytes."""
        self._capacity = max(1, write_rows)
        self._background = IoCounters()
        self._lock = threading.RLock()
        self._thread = ThreadPoolExecutor(1, "recpipe-bulk")
        self._groups: dict[int, ReadGroup] = {}
        self._active = self._new_writes()
        self._leaving: Writes | None = None
        self._written: Future[None] | None = None

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
            records = np.empty((len(group.rows), self.layout.width), np.float32)
            with self._lock:
                cold = np.flatnonzero(~self._take_waiting(group.rows, records))
            before = replace(self.inner.io)
            came = np.empty((len(cold), self.layout.width), np.float32)
            self.inner.gather(group.rows[cold], came)
            records[cold] = came
            self._background = self._background.plus(self.inner.io.plus(before, -1))
            with self._lock:
                # This thread also writes, so whatever was replaced meanwhile is among the waiting writes.
                self._take_waiting(group.rows, records)
                group.records = records
                self._count_memory()
            group.done.set_result(None)
        except BaseException as fault:
            group.done.set_exception(fault)

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
        places, here = self._active.find(rows)
        out[here] = self._active.records[places]
        if self._leaving is not None:
            rest = np.flatnonzero(~here)
            places, older = self._leaving.find(rows[rest])
            out[rest[older]] = self._leaving.records[places]
            here[rest[older]] = True
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
        """Read rows that were not announced from the store, after everything that is queued."""
        wanted = rows[left]
        records = np.empty((len(left), self.layout.width), np.float32)

        def read() -> None:
            before = replace(self.inner.io)
            self.inner.gather(wanted, records)
            self.io = self.io.plus(self.inner.io.plus(before, -1))

        self._thread.submit(read).result()
        out[left] = records
        self.missed += len(left)

    # -- writing -----------------------------------------------------------------------------

    def scatter(self, rows: Rows, records: Records) -> None:
        """Keep ``records`` until there are enough to write; they replace waiting records of the same rows."""
        with self._lock:
            self._raise_faults()
        if self.rounded is not None:  # rounded at once: what is read must not depend on when it is written
            records = self.rounded(records)
        for start in range(0, len(rows), self._capacity):
            part = slice(start, start + self._capacity)
            self._keep(rows[part], records[part])

    def _keep(self, rows: Rows, records: Records) -> None:
        if len(self._active.rows) + len(rows) > self._capacity:
            self._start_writing()
        with self._lock:
            self._active.put(rows, records)
            self._refresh_groups(rows, records)
            self._count_memory()

    def _refresh_groups(self, rows: Rows, records: Records) -> None:
        """Replace records that were read ahead. A group being read takes over waiting writes when it
        arrives."""
        for group in self._groups.values():
            if group.records is not None:
                at, here = positions(group.rows, rows)
                group.records[at[here]] = records[here]

    def _start_writing(self) -> None:
        """Hand the waiting writes to the thread; blocks while it still writes the last lot."""
        if self._written is not None:
            began = time.perf_counter()
            self._written.result()
            self.waited += time.perf_counter() - began
        with self._lock:
            leaving = self._leaving = self._active
            self._active = self._new_writes()
        self._written = Future()
        self._thread.submit(self._write, leaving, self._written)

    def _write(self, leaving: Writes, written: Future[None]) -> None:
        """Write some rows, then queue the rest again, after reads that came meanwhile."""
        try:
            rows, records = leaving.next(WRITE_ROWS)
            before = replace(self.inner.io)
            self.inner.scatter(rows, records)
            self._background = self._background.plus(self.inner.io.plus(before, -1))
            with self._lock:
                leaving.written += len(rows)
                ended = leaving.written == len(leaving.rows)
                if ended:
                    self._leaving = None
        except BaseException as fault:
            written.set_exception(fault)
        else:
            if ended:
                written.set_result(None)
            else:
                self._thread.submit(self._write, leaving, written)

    def _new_writes(self) -> Writes:
        return Writes(self._capacity, self.layout.width)

    # -- the rest ----------------------------------------------------------------------------

    def background(self) -> IoCounters:
        """Traffic of bulk reads and writes."""
        return self._background

    def _raise_faults(self) -> None:
        """Raise the error of a read or a write that failed in the thread."""
        for group in self._groups.values():
            if group.done.done():
                group.done.result()
        if self._written is not None and self._written.done():
            self._written.result()

    def flush(self) -> None:
        """Write everything that waits, and make it as durable as the store makes it."""
        self._start_writing()
        assert self._written is not None
        self._written.result()
        self._thread.submit(self.inner.flush).result()

    def close(self) -> None:
        """Write everything that waits and close the store. Calling it again does nothing."""
        try:
            if len(self._active.rows):
                self._start_writing()
            if self._written is not None:
                self._written.result()
        finally:
            self._thread.shutdown(wait=True)
            self.inner.close()

    def _count_memory(self) -> None:
        held = sum(group.nbytes for group in self._groups.values())
        held += self._active.nbytes + (self._leaving.nbytes if self._leaving else 0)
        self.peak_bytes = max(self.peak_bytes, held)

    @property
    def cold_bytes(self) -> int:
        """Bytes of the records in the store."""
        return self.inner.cold_bytes

    @property
    def overhead_bytes(self) -> int:
        """The store's own overhead, and the most that groups and waiting writes took."""
        return self.inner.overhead_bytes + self.peak_bytes
