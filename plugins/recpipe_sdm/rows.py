"""``TieredRows``: low-precision rows of which the most looked up are in DRAM, and all on the SSD.

The rows in DRAM have slots in one buffer, and rows that are missed are read into the ring behind them, so
that one lookup over the buffer finds all of a batch's rows: its bits are those of a lookup over all rows in
DRAM. ``RowIndex`` says where each of them is.

What a place holds, and what the index says of it, changes under one lock alone, which a lookup holds from its
look into the index to the last row that it has read: it sees each row as it was before a change or after it.
Nobody waits for the disk under this lock.

Rows are read by the thread that scores: it begins to read what the next batch misses, and scores meanwhile.
In a server, threads take turns in Python, and a second one for reads cost more than they did.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.kit import SsdStore
from recpipe.plugin import RowIds, UserError
from recpipe_sdm.admission import Admission
from recpipe_sdm.index import EMPTY, RowIndex

AT_A_TIME = 256
"""Rows that are replaced before others may use the disk."""
EXCHANGED = 1024
"""Rows that change places before others may use the disk."""
PAUSE = 1e-3
"""Seconds in which they may."""
READ_AT_ONCE = 256
"""Blocks that are read at a time for batches."""
MARGIN = 4
"""Places for each row that one batch looks up here: rows are read ahead while others are looked up."""


@dataclass
class Reads:
    """What was looked up and moved since the tiers were made."""

    batches: int = 0
    lookups: int = 0
    missed: int = 0
    """Lookups whose row was not in DRAM when their batch was first looked at: it had no slot, and no earlier
    batch had read it a moment ago."""
    rows_read: int = 0
    """Rows that were read because they were missed, or were about to be."""
    rows_ahead: int = 0
    """Missed rows that were read before their batch was scored."""
    admitted: int = 0
    """Rows that were given a slot since the tiers were made."""
    replaced: int = 0
    """Rows that an update has changed."""


@dataclass
class Shared:
    """What tiers of rows of several sizes have in common: their rows are numbered over all of them."""

    index: RowIndex
    admission: Admission | None = None
    """Gives slots to rows that are looked up more than those in DRAM; None: nothing does."""
    reads: Reads = field(default_factory=Reads)
    using: threading.Lock = field(default_factory=threading.Lock)
    """Held while a place or the index is used. A server's threads take turns in Python: loops and numpy's
    operators on short arrays leave it to nobody, and torch's do."""


class Ring:
    """Hands out places ``first``, ``first + 1``, ... of at most ``most``, as few as do.

    It is a room for what was read a moment ago: each place is used again once all others have been. What was
    read for a request that is never scored goes like everything else.
    """

    def __init__(self, first: int, most: int) -> None:
        self.first, self.most = first, most
        self.size = 0
        """Places that are in use, or were."""
        self._rows: RowIds = np.empty(0, np.int64)
        self._next = 0

    def take(self, rows: RowIds, index: RowIndex) -> int:
        """The first of the places for ``rows`` (distinct), one after the other; ``index`` no longer names
        those that are in them. The caller names ``rows`` once they are there."""
        count = len(rows)
        if self._next + count > self.size:
            self._next = 0
        start = self._next
        old = self._rows[start : start + count]  # 0 where there was none yet: row 0 is not there, then
        here = np.arange(self.first + start, self.first + start + count)
        index.forget(old[index.held(old) == here])
        self._rows[start : start + count] = rows
        self._next = start + count
        return self.first + start

    def grow(self, rows: int) -> None:
        """Have places for a batch that looks up so many rows here, at least two for each: then reading those
        that it lacks, again and again, ends, since what is read last stays."""
        assert 2 * rows <= self.most, (rows, self.most)
        size = min(MARGIN * rows, self.most)
        if size > self.size:
            self._rows = np.concatenate((self._rows, np.zeros(size - self.size, np.int64)))
            self.size = size

    @property
    def nbytes(self) -> int:
        """Memory beside the places themselves."""
        return self._rows.nbytes


class _Flight(NamedTuple):
    """Rows (distinct, ascending) that are being read into the places from ``first`` on, and the tier's
    ``changes`` when that began."""

    rows: RowIds
    first: int
    changes: int


def give_back(start: int, nbytes: int) -> None:
    """Let the machine have the whole pages among these bytes of private memory, which are zero then."""
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (start + nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if length > 0:
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        madvise(first, length, mmap.MADV_DONTNEED)


class TieredRows:
    """Rows of one size, numbered over the tables of ``store``.

    Args:
        shared: what it has in common with other tiers; its own rows are those from ``first`` on there.
        store: all rows, each as the float32 words that its bytes make. Owned: ``close`` closes it.
        hot: the rows that are in DRAM at first, sorted, int64 [n]; as many slots there are.
        room: how many distinct rows a batch can miss at most. Memory is taken by those that are missed.
        buffer: where rows are put, uint8 [len(hot) + 2 * room + spare, bytes of a row]; None: memory of its
            own.
        spare: places for newer rows that no lookup finds yet. Memory is taken by those that are in use.

    Its methods take numbers of its own rows. ``Tiers`` finds a batch's places.
    """

    def __init__(
        self,
        shared: Shared,
        store: SsdStore,
        hot: RowIds,
        room: int,
        buffer: torch.Tensor | None = None,
        first: int = 0,
        spare: int = 0,
    ) -> None:
        self.shared, self.store, self.room, self.first = shared, store, room, first
        self.rows, self.slots, self.spare = store.layout.total_rows, len(hot), spare
        self.ring = Ring(self.slots, 2 * room)
        shape = (self.slots + 2 * room + spare, 4 * store.layout.width)
        self.buffer = torch.empty(shape, dtype=torch.uint8) if buffer is None else buffer
        """All slots, then the ring's places, then spare ones, uint8 [slots + 2 * room + spare, bytes of a
        row]."""
        self.beside = 0
        """Spare places that are in use."""
        self.reading = threading.RLock()
        """Held while rows are read for batches; taken before the other two."""
        self.disk = threading.RLock()
        """Held while the store is used; taken before ``shared.using``, never after it."""
        self.changes = 0
        """Another number once rows on the SSD have changed, and an odd one while they do."""
        self._words: NDArray[np.float32] = self.buffer.numpy().view(np.float32)
        self._reader = store.reader(READ_AT_ONCE)
        self._flight: _Flight | None = None
        self.closed = False
        for start in range(0, len(hot), 65_536):
            store.gather(hot[start : start + 65_536], self._words[start : min(start + 65_536, len(hot))])
        shared.index.change(hot + first, np.arange(len(hot), dtype=np.int32), np.empty(0, np.int64))

    def ahead(self, rows: RowIds) -> None:
        """Begin to read those of ``rows`` (with repeats, without slots) that are not in DRAM, and return.
        Nothing has to follow: batches find their rows without it, later. ``StoreError`` if the disk fails at
        once."""
        with self.reading:
            self.land()
            with self.shared.using:
                flight = self._missing(rows)
            if flight is not None:
                self._reader.start(flight.rows)
                self._flight = flight

    def land(self) -> None:
        """Wait for the rows that ``ahead`` began to read. One that cannot be read is named by ``read``."""
        if self._flight is None:
            return
        with self.reading:
            flight, self._flight = self._flight, None
            if flight is not None:
                with suppress(UserError):
                    self.shared.reads.rows_ahead += self._landed(flight)

    def read(self, rows: RowIds) -> None:
        """Read those of ``rows`` (with repeats) that are not in DRAM, with ``reading`` held: all are there
        until it is released, but for those that lose their slots. ``StoreError`` if one cannot be read."""
        self.land()
        undisturbed = True
        while True:
            # An update may write what is being read: the second time it has to wait.
            with nullcontext() if undisturbed else self.disk:
                with self.shared.using:
                    flight = self._missing(rows)
                if flight is None:
                    return
                self._reader.start(flight.rows)
                undisturbed = self._landed(flight) > 0

    def _missing(self, rows: RowIds) -> _Flight | None:
        """Places for those of ``rows`` that are not in DRAM, with ``using`` held; None if all are."""
        places, cold = self.shared.index.find(rows + self.first)
        missing = rows[places == EMPTY]
        if not len(missing):
            return None
        cold = rows[cold]
        if len(cold) > self.room:
            cold = np.unique(cold)
            if len(cold) > self.room:
                raise ValueError(f"a batch misses {len(cold)} rows, and there is room for {self.room}")
        missing.sort()
        first = np.ones(len(missing), bool)
        np.not_equal(missing[1:], missing[:-1], out=first[1:])
        missing = missing[first]
        self.ring.grow(len(cold))
        return _Flight(missing, self.ring.take(missing + self.first, self.shared.index), self.changes)

    def _landed(self, flight: _Flight) -> int:
        """Wait for these rows; how many can be looked up then: none if some have changed meanwhile."""
        end = flight.first + len(flight.rows)
        try:
            self._reader.finish(self._words[flight.first : end])  # nobody knows these places yet
        except UserError:
            if self._as_it_was(flight):
                raise
            return 0
        with self.shared.using:
            if not self._as_it_was(flight):
                return 0
            rows, places = flight.rows + self.first, np.arange(flight.first, end, dtype=np.int32)
            lacking = self.shared.index.find(rows)[0] == EMPTY
            if not lacking.all():  # the others have got a slot meanwhile
                rows, places = rows[lacking], places[lacking]
            self.shared.index.hold(rows, places)
        self.shared.reads.rows_read += len(flight.rows)
        return len(flight.rows)

    def _as_it_was(self, flight: _Flight) -> bool:
        return flight.changes == self.changes and not self.changes % 2

    def exchange(self, missed: RowIds) -> None:
        """Give slots to those of ``missed`` (numbers over all tiers) that are looked up more than rows that
        have them."""
        admission, index = self.shared.admission, self.shared.index
        assert admission is not None
        entering, leaving = admission.exchange(missed, index, self.first, self.first + self.rows, self.slots)
        for start in range(0, len(entering), EXCHANGED):
            part = slice(start, start + EXCHANGED)
            with self.disk, suppress(UserError):  # a row that cannot be read is named where it is asked for
                if self.closed:
                    return
                self.admit(entering[part] - self.first, leaving[part] - self.first)
            time.sleep(PAUSE)

    def admit(self, entering: RowIds, leaving: RowIds) -> None:
        """Give the slots of the rows ``leaving`` to as many ``entering`` ones, with ``disk`` held."""
        came, index = np.empty((len(entering), self._words.shape[1]), np.float32), self.shared.index
        self.store.gather(entering, came)
        with self.shared.using:
            slots = index.find(leaving + self.first)[0].astype(np.int32)
            self._words[slots] = came
            index.change(entering + self.first, slots, leaving + self.first)
            self.shared.reads.admitted += len(slots)

    def replace(self, rows: RowIds, values: NDArray[np.uint8]) -> int:
        """Replace those of ``rows`` (distinct, int64 [n]) that differ from ``values`` (uint8 [n, bytes of a
        row]) while batches are scored; returns how many do. A lookup finds the old row or the new one."""
        words = values.view(np.float32)
        with self.disk:
            if self.closed:
                raise UserError("the server is stopping")
            old = np.empty_like(words)
            self.store.gather(rows, old)
            differ = (old.view(np.int32) != words.view(np.int32)).any(axis=1)
            rows, words = rows[differ], words[differ]
            if not len(rows):
                return 0
            using = self.shared.using
            with using:
                self.changes += 1
            try:
                self.store.scatter(rows, words)
                with using:
                    places = self.shared.index.find(rows + self.first)[0]
                    here = np.flatnonzero(places >= 0)
                    self._words[places[here]] = words[here]
                    self.shared.reads.replaced += len(rows)
            finally:
                with using:
                    self.changes += 1
        return len(rows)

    def put_beside(self, values: torch.Tensor) -> NDArray[np.int32]:
        """Put newer ``values`` uint8 [n, bytes of a row] into spare places, which no lookup knows; returns
        these."""
        first = self.slots + 2 * self.room
        self.buffer[first : first + len(values)].copy_(values)
        self.beside = len(values)
        return np.arange(first, first + len(values), dtype=np.int32)

    def give_back_spare(self) -> None:
        """Nothing is in the spare places any more."""
        first, width = self.slots + 2 * self.room, self.buffer.shape[1]
        give_back(self.buffer[first : first + self.beside].data_ptr(), self.beside * width)
        self.beside = 0

    def write(self, rows: RowIds, values: NDArray[np.uint8], slots: NDArray[np.int32]) -> None:
        """Write ``values`` of ``rows`` (distinct, ascending), which lookups find in spare places meanwhile,
        to the SSD, and into their ``slots`` where they have some. Blocks without such rows are not written.

        Whoever reads a block meanwhile wants other rows of it, and these have the same bytes before and
        after.
        """
        words = values.view(np.float32)
        for start in range(0, len(rows), AT_A_TIME):
            part = slice(start, start + AT_A_TIME)
            here = np.flatnonzero(slots[part] >= 0)
            self._words[slots[part][here]] = words[part][here]
            with self.disk:
                if self.closed:
                    raise UserError("the server is stopping")
                self.store.scatter(rows[part], words[part])
            time.sleep(PAUSE)

    def values_of(self, rows: RowIds) -> NDArray[np.uint8]:
        """``rows`` as they are on the SSD, uint8 [n, bytes of a row]."""
        found = np.empty((len(rows), self._words.shape[1]), np.float32)
        with self.disk:
            self.store.gather(rows, found)
        return found.view(np.uint8)

    @property
    def dram_bytes(self) -> int:
        """Rows in DRAM, the places that missed rows have taken and newer rows, the store's buffers."""
        rows = (self.slots + self.ring.size + self.beside) * self.buffer.shape[1]
        return rows + self.ring.nbytes + self.store.overhead_bytes

    @property
    def bytes_written(self) -> int:
        """To the SSD: all rows at first, then blocks with replaced ones."""
        return self.store.cold_bytes + self.store.io.bytes_written

    def close(self) -> None:
        """Close the store. Calling it again does nothing."""
        self.closed = True
        with self.reading, self.disk:
            self._flight = None
            self.store.close()
