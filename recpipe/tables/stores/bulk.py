"""A cold store with bulk transfers: rows are read for a group of batches in advance, and written back
together.

A batch needs a few thousand rows scattered over all blocks of the store. The sorted rows of many batches
share blocks or are in adjacent ones, which the ssd store merges into large requests. A caller that knows what
future batches need announces it, and a thread reads it into host memory while training goes on. Writes wait
in host memory until there are enough of them.

Every call sees the newest record: it looks first among waiting writes, then in what was read ahead, then in
the store.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from recpipe.tables.stores.base import ColdStore, IoCounters, Records, Rows

NOWHERE = -1
GROUP_BITS = 6
"""A place in a group is ``position << GROUP_BITS | number of the group``; groups are numbered modulo 64."""
MAX_GROUPS = (1 << GROUP_BITS) - 1
WRITE_ROWS = 4096
"""How many rows of a lot are written before a waiting read has its turn."""


@dataclass
class ReadGroup:
    """Rows that are read ahead together, sorted, and their records once they have arrived."""

    rows: Rows
    records: Records | None = None
    done: Future[None] = field(default_factory=Future)


@dataclass
class Writes:
    """Rows that wait to be written, with their newest records; the first ``count`` places are used."""

    rows: Rows
    records: Records
    count: int = 0


class BulkStore(ColdStore):
    """``inner`` behind bulk reads (``announce``) and bulk writes.

    Args:
        inner: the store itself. Owned: ``close`` closes it.
        write_rows: how many rows wait in memory before they are written.
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
        """Seconds that ``gather`` waited for groups being read."""
        self.announced = 0
        """How many groups were announced."""
        self.peak_bytes = 0
        """The most host memory that groups and waiting writes took, in bytes."""
        self._capacity = max(1, write_rows)
        self._background = IoCounters()
        self._lock = threading.RLock()
        self._thread = ThreadPoolExecutor(1, "recpipe-bulk")
        self._groups: OrderedDict[int, ReadGroup] = OrderedDict()
        self._ahead = np.full(self.layout.total_rows, NOWHERE, np.int32)
        """For each row, the place of its newest record in a group, or NOWHERE."""
        self._active = self._new_writes()
        self._leaving: Writes | None = None
        self._written: Future[None] | None = None
        self._waiting = np.full(self.layout.total_rows, NOWHERE, np.int32)
        """For each row that waits to be written, its place: 2 * position + parity of the lot."""
        self._parity = 0

    # -- reading -----------------------------------------------------------------------------

    def announce(self, rows: Rows) -> int:
        """Start reading distinct ``rows``; returns at once, with the group's number for ``retire``.

        Later ``gather`` calls find the rows here. If there are more than 63 groups, the oldest is forgotten.
        """
        group = ReadGroup(np.sort(rows))
        with self._lock:
            self._raise_faults()
            number = self.announced % (MAX_GROUPS + 1)
            self.announced += 1
            if len(self._groups) == MAX_GROUPS:
                self.retire(next(iter(self._groups)))
            self._groups[number] = group
            self._ahead[group.rows] = (np.arange(len(rows), dtype=np.int32) << GROUP_BITS) | number
        self._thread.submit(self._read, group)
        return number

    def retire(self, number: int) -> None:
        """Forget a group, unless that has happened already: its batches have fetched their rows."""
        with self._lock:
            group = self._groups.pop(number, None)
            if group is None:
                return
            ahead = self._ahead[group.rows]
            mine = (ahead != NOWHERE) & ((ahead & MAX_GROUPS) == number)
            self._ahead[group.rows[mine]] = NOWHERE

    def _read(self, group: ReadGroup) -> None:
        try:
            records = np.empty((len(group.rows), self.layout.width), np.float32)
            before = replace(self.inner.io)
            self.inner.gather(group.rows, records)
            self._background = self._background.plus(self.inner.io.plus(before, -1))
            with self._lock:
                # This thread also writes, so records replaced meanwhile or not written yet are among the
                # waiting writes.
                newer = np.flatnonzero(self._waiting[group.rows] != NOWHERE)
                records[newer] = self._waiting_records(group.rows[newer])
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
                waits = self._waiting[rows] != NOWHERE
                left = np.flatnonzero(~waits)
                ahead = self._ahead[rows[left]]
                under_way = self._under_way(ahead)
                if not under_way:
                    out[waits] = self._waiting_records(rows[waits])
                    for number, group in self._groups.items():
                        here = np.flatnonzero((ahead != NOWHERE) & ((ahead & MAX_GROUPS) == number))
                        if len(here):
                            assert group.records is not None
                            out[left[here]] = group.records[ahead[here] >> GROUP_BITS]
                    break
            began = time.perf_counter()
            under_way[0].done.exception()
            self.waited += time.perf_counter() - began
        left = left[ahead == NOWHERE]
        if len(left):
            self._gather_now(rows, left, out)

    def _under_way(self, ahead: NDArray[np.int32]) -> list[ReadGroup]:
        """Groups that will bring some of the rows at these places and have not arrived yet."""
        needed = np.bincount(ahead[ahead != NOWHERE] & MAX_GROUPS, minlength=MAX_GROUPS + 1)
        return [group for number, group in self._groups.items() if needed[number] and group.records is None]

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
        if self._active.count + len(rows) > self._capacity:
            self._start_writing()
        with self._lock:
            waiting = self._waiting[rows]
            place = waiting >> 1
            new = np.flatnonzero((waiting == NOWHERE) | ((waiting & 1) != self._parity))
            active = self._active
            place[new] = active.count + np.arange(len(new), dtype=np.int32)
            active.rows[place[new]] = rows[new]
            active.records[place] = records
            active.count += len(new)
            self._waiting[rows] = (place << 1) | self._parity
            self._refresh_groups(rows, records)
            self._count_memory()

    def _refresh_groups(self, rows: Rows, records: Records) -> None:
        """Replace records that were read ahead. A group being read takes over waiting writes when it
        arrives."""
        ahead = self._ahead[rows]
        for number, group in self._groups.items():
            here = np.flatnonzero((ahead != NOWHERE) & ((ahead & MAX_GROUPS) == number))
            if len(here) and group.records is not None:
                group.records[ahead[here] >> GROUP_BITS] = records[here]

    def _start_writing(self) -> None:
        """Hand the waiting writes to the thread; blocks while it still writes the last lot."""
        if self._written is not None:
            self._written.result()
        with self._lock:
            leaving = self._leaving = self._active
            self._active = self._new_writes()
            self._parity ^= 1
        order = np.argsort(leaving.rows[: leaving.count])
        self._written = Future()
        self._thread.submit(self._write, leaving, order, self._written)

    def _write(self, leaving: Writes, order: NDArray[np.int64], written: Future[None]) -> None:
        """Write the first rows of ``order``, then queue the rest again, after reads that came meanwhile."""
        try:
            part, rest = order[:WRITE_ROWS], order[WRITE_ROWS:]
            rows = leaving.rows[part]
            before = replace(self.inner.io)
            self.inner.scatter(rows, leaving.records[part])
            self._background = self._background.plus(self.inner.io.plus(before, -1))
            with self._lock:
                waiting = self._waiting[rows]
                done = (waiting != NOWHERE) & ((waiting & 1) != self._parity)
                self._waiting[rows[done]] = NOWHERE
                if not len(rest):
                    self._leaving = None
        except BaseException as fault:
            written.set_exception(fault)
        else:
            if len(rest):
                self._thread.submit(self._write, leaving, rest, written)
            else:
                written.set_result(None)

    def _new_writes(self) -> Writes:
        shape = (self._capacity, self.layout.width)
        return Writes(np.empty(self._capacity, np.int64), np.empty(shape, np.float32))

    def _waiting_records(self, rows: Rows) -> Records:
        """Newest records of ``rows``, all of which wait to be written."""
        waiting = self._waiting[rows]
        active = (waiting & 1) == self._parity
        records = np.empty((len(rows), self.layout.width), np.float32)
        records[active] = self._active.records[waiting[active] >> 1]
        if not active.all():
            assert self._leaving is not None
            records[~active] = self._leaving.records[waiting[~active] >> 1]
        return records

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
            if self._active.count:
                self._start_writing()
                self._active.count = 0
            if self._written is not None:
                self._written.result()
        finally:
            self._thread.shutdown(wait=True)
            self.inner.close()

    def _count_memory(self) -> None:
        held = sum(group.records.nbytes for group in self._groups.values() if group.records is not None)
        held += self._active.records.nbytes + (self._leaving.records.nbytes if self._leaving else 0)
        self.peak_bytes = max(self.peak_bytes, held)

    @property
    def cold_bytes(self) -> int:
        """Bytes of the records in the store."""
        return self.inner.cold_bytes

    @property
    def overhead_bytes(self) -> int:
        """The store's own overhead, 8 bytes per row, and the most that groups and waiting writes took."""
        maps = self._ahead.nbytes + self._waiting.nbytes
        return self.inner.overhead_bytes + maps + self.peak_bytes
