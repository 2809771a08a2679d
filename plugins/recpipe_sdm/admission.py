"""LFU admission: which rows get the slots, by how often they are looked up while serving."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recpipe.kit import compiled
from recpipe.plugin import RowIds
from recpipe_sdm.index import RowIndex

EVERY = 256
"""Batches from one change of the rows in DRAM to the next."""
COUNTED = 4
"""One of so many batches is counted, so many times: counting takes as long as looking rows up."""
MOST = 4096
"""Rows that change places at a time."""
HALVED = 64
"""After so many changes counts are halved: what was popular long ago leaves."""
COUNTERS = 4
"""For each slot; of 16 bits."""
FULL = (1 << 16) - 1
AT_A_TIME = 1 << 20
"""Rows among which those that are looked up least are sought at a time."""
Counters = NDArray[np.uint16]


class Admission:
    """Counts lookups (aged), and tells which rows should change places every so many batches.

    There are counters for each slot and not for each row: a row has two of them, which it shares with others,
    and the lesser one is taken to be its own (a count-min sketch, as TinyLFU has it). It is never below the
    row's count, and for those that are looked up often it is close.
    """

    def __init__(self, slots: int, every: int = EVERY) -> None:
        self.slots, self.every = slots, every
        self._counters: Counters = np.zeros(counter_bytes(slots) // 2, np.uint16)
        self._missed: list[RowIds] = []
        self._batches = self._changes = 0

    def before(self, rows: RowIds, counts: RowIds) -> None:
        """Lookups before (``counts`` int64 [n] of ``rows``), which count like those that follow."""
        _add(self._counters, rows, np.minimum(counts, FULL))

    def note(self, rows: RowIds, missed: RowIds) -> None:
        """A batch looks ``rows`` up (int64 [N]; negative ones are not its own), of which ``missed`` have no
        slot."""
        if self._batches % COUNTED == 0:
            _add(self._counters, rows, np.full(1, COUNTED))
        if len(missed):
            self._missed.append(missed)
        self._batches += 1

    @property
    def due(self) -> bool:
        """Whether it is time for a change."""
        return self._batches >= self.every

    def begin(self) -> RowIds:
        """Begin a change: the rows that were missed since the last one, distinct and sorted."""
        missed, self._missed, self._batches = self._missed, [], 0
        self._changes += 1
        if self._changes % HALVED == 0:
            self._counters >>= 1
        return np.unique(np.concatenate(missed)) if missed else np.empty(0, np.int64)

    def exchange(
        self, missed: RowIds, index: RowIndex, start: int, stop: int, slots: int
    ) -> tuple[RowIds, RowIds]:
        """Rows that should get a slot, of the ``missed`` ones among the rows [start, stop), and as many of
        these rows that should lose theirs, since they are looked up less. ``slots``: how many have one."""
        entering = missed[(missed >= start) & (missed < stop)]
        entering = index.without_slots(entering)
        counts = self.counts(entering)
        order = np.argsort(-counts, kind="stable")[: min(MOST, slots)]
        entering, counts = entering[order], counts[order]
        # As many rows with slots that are looked up least, least first, and their counts.
        most, leaving, least = len(entering), np.empty(0, np.int64), np.empty(0, np.int32)
        for low in range(start, stop if most else start, AT_A_TIME):
            some = index.slotted(low, min(low + AT_A_TIME, stop))
            leaving, least = np.concatenate((leaving, some)), np.concatenate((least, self.counts(some)))
            if len(leaving) > most:
                chosen = np.argpartition(least, most - 1)[:most]
                leaving, least = leaving[chosen], least[chosen]
        order = np.lexsort((leaving, least))
        leaving, least = leaving[order], least[order]
        gains = counts[: len(leaving)] > least
        count = len(gains) if gains.all() else int(np.argmin(gains))
        return entering[:count], leaving[:count]

    def counts(self, rows: RowIds) -> NDArray[np.int32]:
        """How often rows were looked up, or a little more: int32 [n]."""
        found: NDArray[np.int32] = _counts(self._counters, rows)
        return found

    @property
    def nbytes(self) -> int:
        """Memory of the counters."""
        return self._counters.nbytes


def counter_bytes(slots: int) -> int:
    """``Admission.nbytes`` for so many slots."""
    return 2 * COUNTERS * max(1, slots)


def _both(row: int, size: int) -> tuple[int, int]:
    """A row's two counters of ``size`` in all: one in each half."""
    key = (row ^ (row >> 31)) & 0x7FFFFFFF
    one = key * 2654435761 & 0x7FFFFFFF
    other = (one ^ (key >> 3)) * 2246822519 & 0x7FFFFFFF
    half = size // 2
    return one * half >> 31, half + (other * half >> 31)


@compiled
def _add(counters: Counters, rows: RowIds, counts: RowIds) -> None:
    """Add ``counts`` (one for each row, or one for all): a counter becomes at least the row's new count."""
    for i in range(len(rows)):
        if rows[i] < 0:
            continue
        one, other = _both(rows[i], len(counters))
        now = min(counters[one], counters[other]) + counts[i if len(counts) > 1 else 0]
        now = min(now, FULL)
        if counters[one] < now:
            counters[one] = now
        if counters[other] < now:
            counters[other] = now


@compiled
def _counts(counters: Counters, rows: RowIds) -> NDArray[np.int32]:
    found = np.empty(len(rows), np.int32)
    for i in range(len(rows)):
        one, other = _both(rows[i], len(counters))
        found[i] = min(counters[one], counters[other])
    return found
