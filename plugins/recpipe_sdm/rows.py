"""``TieredRows``: low-precision rows of which the most looked up are in DRAM, and all on the SSD.

The rows in DRAM have slots in one buffer, and rows that are missed are read into the ring behind them, so
that one lookup over the buffer finds all of a batch's rows: its bits are those of a lookup over all rows in
DRAM. The index is an array with the place of every row, int32; looking it up is one gather of numpy's. A
cache with a hash table, or one written in numpy, takes more time than the reads that it saves.

What a place holds, and what the index says of it, changes under one lock alone, which a lookup holds from its
look into the index to the last row that it has read: it sees each row as it was before a change or after it.
Nobody waits for the disk under this lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.kit import ColdStore, keep_to_one_core, one_thread
from recpipe.plugin import RowIds, UserError
from recpipe_sdm.admission import Admission
from recpipe_sdm.ring import EMPTY, Ring

Places = NDArray[np.int32]
PRUNED = -2
"""In the index: the row is neither in DRAM nor on the SSD, and adds nothing."""
AT_A_TIME = 256
"""Rows that change places, or are replaced, before others may use the disk."""
PAUSE = 1e-3
"""Seconds in which they may."""


@dataclass
class Reads:
    """What was looked up and moved since the tier was made."""

    batches: int = 0
    lookups: int = 0
    missed: int = 0
    """Lookups whose row had no slot in DRAM."""
    rows_read: int = 0
    """Rows that were read because they were missed, or were about to be."""
    rows_ahead: int = 0
    """Those of them that were read before their batch was scored."""
    admitted: int = 0
    """Rows that were given a slot since the tier was made."""
    replaced: int = 0
    """Rows that an update has changed."""


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

    ``found`` gives a batch's places; ``ahead`` reads what a batch to come will miss.
    """

    def __init__(
        self,
        store: ColdStore,
        hot: RowIds,
        room: int,
        admission: Admission | None = None,
        buffer: torch.Tensor | None = None,
        pruned: RowIds | None = None,
        using: threading.Lock | None = None,
    ) -> None:
        self.store, self.room, self.slots = store, room, len(hot)
        self.admission = admission
        self.reads = Reads()
        self.ring = Ring(self.slots, 2 * room)
        shape = (self.slots + 2 * room, 4 * store.layout.width)
        self.buffer = torch.empty(shape, dtype=torch.uint8) if buffer is None else buffer
        """All slots, then the ring's places, uint8 [slots + 2 * room, bytes of a row]."""
        self.index: Places = np.full(store.layout.total_rows, EMPTY, np.int32)
        """The place of every row; -1: it is on the SSD alone, ``PRUNED``: it is nowhere."""
        if pruned is not None:
            self.index[pruned] = PRUNED
        # A server's threads take turns in Python: numpy's operators leave it to nobody, and torch's do.
        self.using = using or threading.Lock()
        """Held while a place or the index is used."""
        self.disk = threading.RLock()
        """Held while the store is used; taken before ``using``, never after it."""
        self._words: NDArray[np.float32] = self.buffer.numpy().view(np.float32)
        self._thread = ThreadPoolExecutor(1, "recpipe-sdm", keep_to_one_core)
        with one_thread():  # setting torch's number of threads also applies to all future threads
            self._thread.submit(int).result()
        self._change: Future[None] | None = None
        self.closed = False
        for start in range(0, len(hot), 65_536):
            self._admit(hot[start : start + 65_536], np.arange(len(hot))[start : start + 65_536])

    def ahead(self, rows: RowIds) -> None:
        """Read those of ``rows`` (int64 [N], with repeats) that are not in DRAM. Nothing has to follow:
        batches find their rows without it, later. ``StoreError`` if a row cannot be read."""
        if not (self.index[rows] == EMPTY).any():
            return
        with self.disk:
            before = self.reads.rows_read
            self.read(rows)
            self.reads.rows_ahead += self.reads.rows_read - before

    def read(self, rows: RowIds) -> None:
        """The same, with ``disk`` held: all are in DRAM until it is released."""
        while True:
            with self.using:
                places = self.index[rows]
                if not (places == EMPTY).any():
                    return
                cold = np.unique(rows[self._cold(places)])
                if len(cold) > self.room:
                    raise ValueError(f"a batch misses {len(cold)} rows, and there is room for {self.room}")
                self.ring.grow(len(cold))
                missing = cold[self.index[cold] == EMPTY]
                first = self.ring.take(missing, self.index)
            # Nobody knows these places yet.
            self.store.gather(missing, self._words[first : first + len(missing)])
            with self.using:
                self.index[missing] = np.arange(first, first + len(missing))
            self.reads.rows_read += len(missing)

    def _cold(self, places: Places) -> NDArray[np.bool_]:
        """Which of ``places`` are no slots."""
        cold: NDArray[np.bool_] = (places == EMPTY) | (places >= self.slots)
        return cold

    def looked_up(self, rows: RowIds, places: Places) -> None:
        """Note that a batch looks up ``rows``, which had these ``places`` when it came."""
        missed = self._cold(places)
        self.reads.batches += 1
        self.reads.lookups += len(rows)
        self.reads.missed += int(missed.sum())
        if self.admission is None:
            return
        self.admission.count(torch.from_numpy(rows), rows[missed])
        if self.admission.due and (self._change is None or self._change.done()):
            self._change = self._thread.submit(self._exchange, self.admission)

    def _exchange(self, admission: Admission) -> None:
        """Give slots to rows that are looked up more than those that have them."""
        entering, leaving = admission.exchange(self.index, self.slots)
        for start in range(0, len(entering), AT_A_TIME):
            part = slice(start, start + AT_A_TIME)
            with self.disk, suppress(UserError):  # a row that cannot be read is named where it is asked for
                slots = self.index[leaving[part]].astype(np.int64)
                self._admit(entering[part], slots, leaving[part])
                self.reads.admitted += len(slots)
            time.sleep(PAUSE)

    def _admit(self, rows: RowIds, slots: NDArray[np.int64], leaving: RowIds | None = None) -> None:
        came = np.empty((len(rows), self._words.shape[1]), np.float32)
        self.store.gather(rows, came)
        with self.using:
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
                self.store.scatter(rows, words)
                with self.using:
                    places = self.index[rows]
                    here = np.flatnonzero(places >= 0)
                    self._words[places[here]] = words[here]
                    self.reads.replaced += len(rows)
        return len(rows)

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
        self._thread.shutdown(wait=True)
        with self.disk:
            self.closed = True
            self.store.close()


@contextmanager
def found(
    tiers: Sequence[TieredRows], rows: Sequence[RowIds], using: threading.Lock
) -> Iterator[list[torch.Tensor]]:
    """The place in its tier's buffer of each row that a batch looks up, int64 [N] for each tier; -1 for a
    pruned one. They are valid in the block. ``rows``: int64 [N] for each tier, with repeats. ``using``: the
    tiers' lock. ``StoreError`` if a row cannot be read."""
    with ExitStack() as held:
        at_first = held.enter_context(ExitStack())
        at_first.enter_context(using)
        places = [tier.index[own] for tier, own in zip(tiers, rows, strict=True)]
        for tier, own, at in zip(tiers, rows, places, strict=True):
            tier.looked_up(own, at)
        if any((at == EMPTY).any() for at in places):
            at_first.close()
            for tier in tiers:
                held.enter_context(tier.disk)
            for tier, own in zip(tiers, rows, strict=True):
                tier.read(own)
            held.enter_context(using)
            places = [tier.index[own] for tier, own in zip(tiers, rows, strict=True)]
        yield [torch.from_numpy(np.maximum(at, EMPTY, dtype=np.int64)) for at in places]
