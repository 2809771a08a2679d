"""``TieredRows``: low-precision rows of which the most looked up are in DRAM, and all on the SSD.

The rows in DRAM have slots in one buffer, and rows that are missed are read into the ring behind them, so
that one lookup over the buffer finds all of a batch's rows: its bits are those of a lookup over all rows in
DRAM. The index is an array with the place of every row, int32; looking it up is one gather of numpy's. A
cache with a hash table, or one written in numpy, takes more time than the reads that it saves.

What a place holds, and what the index says of it, changes under one lock alone, which a lookup holds from its
look into the index to the last row that it has read: it sees each row as it was before a change or after it.
Nobody waits for the disk under this lock.

Rows are read by the thread that scores: it begins to read what the next batch misses, and scores meanwhile.
In a server, threads take turns in Python, and a second one for reads cost more than they did.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.kit import SsdStore, keep_to_one_core, one_thread
from recpipe.plugin import RowIds, UserError
from recpipe_sdm.admission import Admission
from recpipe_sdm.looks import Look, Places, Reads
from recpipe_sdm.ring import EMPTY, Ring

PRUNED = -1
"""In the index: the row is neither in DRAM nor on the SSD, and adds nothing. FBGEMM's number for that."""
AT_A_TIME = 256
"""Rows that change places, or are replaced, before others may use the disk."""
PAUSE = 1e-3
"""Seconds in which they may."""
READ_AT_ONCE = 256
"""Blocks that are read at a time for batches."""
NOTED, MOST_NOTED = 32, 1 << 16
"""Batches and lookups that are noted, at most, before they are counted: together they cost less."""


class _Flight(NamedTuple):
    """Rows (distinct, ascending) that are being read into the places from ``first`` on, and the tier's
    ``changes`` when that began."""

    rows: RowIds
    first: int
    changes: int


class TieredRows:
    """Rows of one size, numbered over the tables of ``store``.

    Args:
        store: all rows, each as the float32 words that its bytes make. Owned: ``close`` closes it.
        hot: the rows that are in DRAM at first, sorted, int64 [n]; as many slots there are.
        room: how many distinct rows a batch can miss at most. Memory is taken by those that are missed.
        admission: gives slots to rows that are looked up more than those in DRAM; None: ``hot`` stays.
        buffer: where rows are put, uint8 [len(hot) + 2 * room, bytes of a row]; None: memory of its own.
        pruned: rows that add nothing to a lookup, int64 [n].
        using: the lock, if other tiers are looked up at the same time.
        index: where the places of rows are written, int32 [rows]; None: memory of its own.

    ``Tiers`` finds a batch's places.
    """

    def __init__(
        self,
        store: SsdStore,
        hot: RowIds,
        room: int,
        admission: Admission | None = None,
        buffer: torch.Tensor | None = None,
        pruned: RowIds | None = None,
        using: threading.Lock | None = None,
        index: Places | None = None,
    ) -> None:
        self.store, self.room, self.slots = store, room, len(hot)
        self.admission = admission
        self._reads = Reads()
        self.ring = Ring(self.slots, 2 * room)
        shape = (self.slots + 2 * room, 4 * store.layout.width)
        self.buffer = torch.empty(shape, dtype=torch.uint8) if buffer is None else buffer
        """All slots, then the ring's places, uint8 [slots + 2 * room, bytes of a row]."""
        self.index: Places = np.empty(store.layout.total_rows, np.int32) if index is None else index
        """The place of every row; ``EMPTY``: it is on the SSD alone, ``PRUNED``: it is nowhere."""
        self.index[:] = EMPTY
        if pruned is not None:
            self.index[pruned] = PRUNED
        # A server's threads take turns in Python: numpy's operators leave it to nobody, and torch's do.
        self.using = using or threading.Lock()
        """Held while a place or the index is used."""
        self.reading = threading.RLock()
        """Held while rows are read for batches; taken before the other two."""
        self.disk = threading.RLock()
        """Held while the store is used; taken before ``using``, never after it."""
        self.changes = 0
        """Another number once rows on the SSD have changed, and an odd one while they do."""
        self.admissions = 0
        """Changes of the rows that have slots."""
        self._words: NDArray[np.float32] = self.buffer.numpy().view(np.float32)
        self._reader = store.reader(READ_AT_ONCE)
        self._flight: _Flight | None = None
        self._noted: list[Look] = []
        self._lookups = 0
        self._thread = ThreadPoolExecutor(1, "recpipe-sdm", keep_to_one_core)
        with one_thread():  # setting torch's number of threads also applies to all future threads
            self._thread.submit(int).result()
        self._change: Future[None] | None = None
        self.closed = False
        for start in range(0, len(hot), 65_536):
            self._admit(hot[start : start + 65_536], np.arange(len(hot))[start : start + 65_536])

    def look(self, rows: RowIds) -> Look:
        """Where ``rows`` (int64 [N], with repeats) are now."""
        with self.using:
            places = self.index[rows]
            # As unsigned numbers, what has no place is above all slots.
            cold = np.flatnonzero(places.view(np.uint32) >= self.slots)
            return Look(rows, places, cold, self.admissions)

    def ahead(self, look: Look) -> None:
        """Begin to read the rows that are not in DRAM, and return. Nothing has to follow: batches find their
        rows without it, later. ``StoreError`` if the disk fails at once."""
        with self.reading:
            self.land()
            with self.using:
                flight = self._missing(look)
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
                    self._reads.rows_ahead += self._landed(flight)

    def read(self, look: Look) -> None:
        """Read the rows that are not in DRAM, with ``reading`` held: all are there until it is released.
        ``StoreError`` if one cannot be read."""
        self.land()
        undisturbed = True
        while True:
            # An update may write what is being read: the second time it has to wait.
            with nullcontext() if undisturbed else self.disk:
                with self.using:
                    flight = None if self.settled(look) else self._missing(look)
                if flight is None:
                    return
                self._reader.start(flight.rows)
                undisturbed = self._landed(flight) > 0

    def settled(self, look: Look) -> bool:
        """Bring ``look`` up to date, with ``using`` held; whether all of its rows are in DRAM then."""
        if look.admissions != self.admissions:
            look.places, look.admissions = self.index[look.rows], self.admissions
            look.cold = np.flatnonzero(look.places.view(np.uint32) >= self.slots)
        if not len(look.cold):
            return True
        # Other rows have kept their slots.
        now = self.index[look.rows[look.cold]]
        look.places[look.cold] = now
        return bool(now.min() != EMPTY)

    def _missing(self, look: Look) -> _Flight | None:
        """Places for those of its rows that are not in DRAM, with ``using`` held; None if all are."""
        cold = look.rows[look.cold]
        missing = cold[self.index[cold] == EMPTY]
        if not len(missing):
            return None
        if len(cold) > self.room:
            cold = np.unique(cold)
            if len(cold) > self.room:
                raise ValueError(f"a batch misses {len(cold)} rows, and there is room for {self.room}")
        missing.sort()
        first = np.ones(len(missing), bool)
        np.not_equal(missing[1:], missing[:-1], out=first[1:])
        missing = missing[first]
        self.ring.grow(len(cold))
        return _Flight(missing, self.ring.take(missing, self.index), self.changes)

    def _landed(self, flight: _Flight) -> int:
        """Wait for these rows; how many can be looked up then: none if some have changed meanwhile."""
        end = flight.first + len(flight.rows)
        try:
            self._reader.finish(self._words[flight.first : end])  # nobody knows these places yet
        except UserError:
            if self._as_it_was(flight):
                raise
            return 0
        with self.using:
            if not self._as_it_was(flight):
                return 0
            rows, places = flight.rows, np.arange(flight.first, end)
            lacking = self.index[rows] == EMPTY
            if not lacking.all():  # the others have got a slot meanwhile
                rows, places = rows[lacking], places[lacking]
            self.index[rows] = places
        self._reads.rows_read += len(flight.rows)
        return len(flight.rows)

    def _as_it_was(self, flight: _Flight) -> bool:
        return flight.changes == self.changes and not self.changes % 2

    def note(self, look: Look) -> None:
        """Note that a batch looks these rows up, with ``using`` held."""
        self._noted.append(look)
        self._lookups += len(look.rows)
        if len(self._noted) >= NOTED or self._lookups >= MOST_NOTED:
            self._count()

    def _count(self) -> None:
        """Count what is noted, with ``using`` held."""
        noted, self._noted, self._lookups = self._noted, [], 0
        if not noted:
            return
        rows = np.concatenate([look.rows for look in noted])
        places = np.concatenate([look.places for look in noted])
        missed = (places == EMPTY) | (places >= self.slots)
        self._reads.batches += len(noted)
        self._reads.lookups += len(rows)
        self._reads.missed += int(missed.sum())
        if self.admission is None:
            return
        self.admission.count(torch.from_numpy(rows), rows[missed], len(noted))
        if self.admission.due and not self.closed and (self._change is None or self._change.done()):
            self._change = self._thread.submit(self._exchange, self.admission)

    @property
    def reads(self) -> Reads:
        """What was looked up and moved so far."""
        with self.using:
            self._count()
        return self._reads

    def _exchange(self, admission: Admission) -> None:
        """Give slots to rows that are looked up more than those that have them."""
        entering, leaving = admission.exchange(self.index, self.slots)
        for start in range(0, len(entering), AT_A_TIME):
            part = slice(start, start + AT_A_TIME)
            with self.disk, suppress(UserError):  # a row that cannot be read is named where it is asked for
                slots = self.index[leaving[part]].astype(np.int64)
                self._admit(entering[part], slots, leaving[part])
                self._reads.admitted += len(slots)
            time.sleep(PAUSE)

    def _admit(self, rows: RowIds, slots: NDArray[np.int64], leaving: RowIds | None = None) -> None:
        came = np.empty((len(rows), self._words.shape[1]), np.float32)
        self.store.gather(rows, came)
        with self.using:
            self.admissions += 1
            if leaving is not None:
                self.index[leaving] = EMPTY
            self._words[slots] = came
            self.index[rows] = slots

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
            if len(rows):
                self._write(rows, words)
        return len(rows)

    def _write(self, rows: RowIds, words: NDArray[np.float32]) -> None:
        """Replace these rows, with ``disk`` held."""
        with self.using:
            self.changes += 1
        try:
            self.store.scatter(rows, words)
            with self.using:
                places = self.index[rows]
                here = np.flatnonzero(places >= 0)
                self._words[places[here]] = words[here]
                self._reads.replaced += len(rows)
        finally:
            with self.using:
                self.changes += 1

    @property
    def dram_bytes(self) -> int:
        """Rows in DRAM, the index, the places that missed rows have taken, the store's buffers."""
        rows = (self.slots + self.ring.size) * self.buffer.shape[1]
        counts = 0 if self.admission is None else self.admission.nbytes
        return rows + self.index.nbytes + self.ring.nbytes + counts + self.store.overhead_bytes

    @property
    def bytes_written(self) -> int:
        """To the SSD: all rows at first, then blocks with replaced ones."""
        return self.store.cold_bytes + self.store.io.bytes_written

    def close(self) -> None:
        """Wait for reads and close the store. Calling it again does nothing."""
        self.closed = True
        self._thread.shutdown(wait=True)
        with self.reading, self.disk:
            self._flight = None
            self.store.close()
