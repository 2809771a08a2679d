"""``TieredRows``: low-precision rows of which the most looked up are in DRAM, and all on the SSD.

The rows in DRAM have slots in one buffer, and rows that a batch misses are read into the room behind them, so
that one lookup over the buffer finds all of a batch's rows: its bits are those of a lookup over all rows in
DRAM. The index is an array with the slot of every row, int32; looking it up is one gather of torch's. A cache
with a hash table, or one written in numpy, takes more time than the reads that it saves.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.kit import ColdStore, keep_to_one_core, one_thread
from recpipe.plugin import RowIds
from recpipe_sdm.admission import Admission

ROOMS = 2
"""Rooms for missed rows: one batch is scored while the next one's rows are read."""


@dataclass
class Reads:
    """What was looked up and read since the tier was made."""

    batches: int = 0
    lookups: int = 0
    missed: int = 0
    """Lookups whose row was not in DRAM."""
    rows_read: int = 0
    """Distinct rows that batches missed."""
    largest: int = 0
    """The most rows that one batch missed."""
    admitted: int = 0
    """Rows that were given a slot since the tier was made."""


class TieredRows:
    """Rows of one size, numbered over the tables of ``store``.

    Args:
        store: all rows, each as the float32 words that its bytes make. Owned: ``close`` closes it.
        hot: the rows that are in DRAM at first, sorted, int64 [n]; as many slots there are.
        room: how many distinct rows a batch can miss at most. Memory is taken by those that are missed.
        admission: gives slots to rows that are looked up more than those in DRAM; None: ``hot`` stays.
        buffer: where rows are put, uint8 [len(hot) + 2 * room, bytes of a row]; None: memory of its own.

    ``announce`` begins to read what a batch misses. Batches are scored in the order in which they were
    announced, and one's places are valid until the second batch after it is announced.
    """

    def __init__(
        self,
        store: ColdStore,
        hot: RowIds,
        room: int,
        admission: Admission | None = None,
        buffer: torch.Tensor | None = None,
    ) -> None:
        self.store = store
        self.room = room
        self.slots = len(hot)
        self.admission = admission
        self.reads = Reads()
        shape = (self.slots + ROOMS * room, 4 * store.layout.width)
        self.buffer = torch.empty(shape, dtype=torch.uint8) if buffer is None else buffer
        """All slots, then the rooms for missed rows, uint8 [slots + 2 * room, bytes of a row]."""
        self.place = torch.full((store.layout.total_rows,), -1, dtype=torch.int32)
        """The slot of every row; -1: it is on the SSD alone."""
        self._words: NDArray[np.float32] = self.buffer.numpy().view(np.float32)
        self._thread = ThreadPoolExecutor(1, "recpipe-sdm", keep_to_one_core)
        with one_thread():  # setting torch's number of threads also applies to all future threads
            self._thread.submit(int).result()
        self._using = threading.Lock()
        """Held while the store or the index is used."""
        self._announced = 0
        self._admit(hot, np.arange(len(hot)))

    def announce(self, rows: torch.Tensor) -> Future[torch.Tensor]:
        """Begin to read what a batch of lookups (int64 [N], rows with repeats) misses.

        The result is the place of each lookup's row in ``buffer``, int64 [N]; ``StoreError`` if a row cannot
        be read.
        """
        room = self._announced % ROOMS
        self._announced += 1
        return self._thread.submit(self._resolve, rows, self.slots + room * self.room)

    @torch.inference_mode()
    def _resolve(self, rows: torch.Tensor, first: int) -> torch.Tensor:
        """The places of ``rows``; those that are missed are read into the buffer from place ``first`` on."""
        with self._using:
            if self.admission is not None:
                self._adapt(self.admission, rows)
            places = self.place[rows]
            missing = (places < 0).nonzero().squeeze(1)
            reads = self.reads
            reads.batches += 1
            reads.lookups += len(rows)
            if len(missing):
                distinct, which = torch.unique(rows[missing], return_inverse=True)
                if len(distinct) > self.room:
                    raise ValueError(
                        f"a batch misses {len(distinct)} rows, and there is room for {self.room}"
                    )
                self.store.gather(distinct.numpy(), self._words[first : first + len(distinct)])
                places[missing] = (which + first).int()
                reads.missed += len(missing)
                reads.rows_read += len(distinct)
                reads.largest = max(reads.largest, len(distinct))
                if self.admission is not None:
                    self.admission.missed(distinct)
            return places.long()

    def _adapt(self, admission: Admission, rows: torch.Tensor) -> None:
        admission.count(rows)
        if not admission.due:
            return
        # Batches on their way may look up slots that are freed now, but none that were freed before.
        admitted, slots = admission.chosen()
        self._admit(admitted, slots)
        self.reads.admitted += len(admitted)
        leaving = admission.leaving(self.place)
        self.place[leaving] = -1

    def _admit(self, rows: RowIds, slots: NDArray[np.int64]) -> None:
        for start in range(0, len(rows), 65_536):
            part, into = rows[start : start + 65_536], slots[start : start + 65_536]
            came = np.empty((len(part), self._words.shape[1]), np.float32)
            self.store.gather(part, came)
            self._words[into] = came
            self.place[torch.from_numpy(part)] = torch.from_numpy(into).int()

    def replace(self, rows: RowIds, values: NDArray[np.uint8]) -> None:
        """Replace distinct ``rows`` (int64 [n]) by ``values`` (uint8 [n, bytes of a row]) while batches are
        scored. A batch announced before has the old row or the new one."""
        with self._using:
            self.store.scatter(rows, values.view(np.float32))
            places = self.place[torch.from_numpy(rows)].numpy()
            here = np.flatnonzero(places >= 0)
            self._words[places[here]] = values.view(np.float32)[here]

    @property
    def dram_bytes(self) -> int:
        """Rows in DRAM, the index, the most room that missed rows have taken, the store's buffers."""
        rows = self.slots + ROOMS * self.reads.largest
        counts = 0 if self.admission is None else self.admission.nbytes
        return rows * self.buffer.shape[1] + self.place.nbytes + counts + self.store.overhead_bytes

    def close(self) -> None:
        """Wait for reads and close the store."""
        self._thread.shutdown(wait=True)
        self.store.close()
