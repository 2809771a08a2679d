"""``Tiers``: rows of several sizes under one index, so that one look finds all of a batch's rows."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from recpipe_serve import keep_to_one_core, one_thread

from recpipe.plugin import RowIds
from recpipe_sdm.index import EMPTY, Places, State
from recpipe_sdm.rows import Shared, TieredRows


@dataclass
class Look:
    """What a batch looks up, and what the index said: ``rows`` int64 [N] with repeats, their ``places`` int64
    [N], and where among them those are that have no slot, ``cold``. ``version``: the index's; ``missed``: how
    many were not in DRAM at first; ``lookups``: how many are the tiers' own, others being ``elsewhere``."""

    rows: RowIds
    places: RowIds
    cold: RowIds
    version: int
    missed: int
    lookups: int


FORGOTTEN = 4096
"""Rows that are forgotten at a time while lookups wait."""


class Newer(NamedTuple):
    """Rows (distinct, ascending, by the numbers of their tier) and their newer values, uint8 [n, bytes of a
    row]."""

    tier: TieredRows
    rows: RowIds
    values: torch.Tensor


@dataclass
class _Staged:
    """``newer`` rows that are in spare places, the ``slots`` that they had before, and the index's state in
    which they are found there; ``found``: whether it is in it."""

    newer: Sequence[Newer]
    slots: list[Places]
    state: State
    found: bool = False


class Tiers:
    """``tiers``, whose rows are numbered over all of them in their order; and the thread in which rows change
    places. Owned: ``close`` closes them."""

    def __init__(self, shared: Shared, tiers: Sequence[TieredRows]) -> None:
        self.shared, self.tiers = shared, tiers
        self._ends = list(accumulate(tier.rows for tier in tiers))
        self._thread = ThreadPoolExecutor(1, "recpipe-sdm", keep_to_one_core)
        with one_thread():  # setting torch's number of threads also applies to all future threads
            self._thread.submit(int).result()
        self.moving = threading.Lock()
        """Held by who changes which rows have slots, or which place a row has."""
        self._staged: _Staged | None = None
        self.change: Future[None] | None = None
        """The last change of the rows that have slots."""
        self._closed = False

    def look(self, rows: RowIds, lookups: int | None = None) -> Look:
        """Where ``rows`` (int64 [N], with repeats) are now. ``lookups``: how many of them are not
        ``elsewhere``; None: all. ``IndexError`` for one that does not exist."""
        index = self.shared.index
        with self.shared.using:
            places, cold = index.find(rows)
            missed = int((places[cold] == EMPTY).sum()) if len(cold) else 0
            return Look(rows, places, cold, index.version, missed, len(rows) if lookups is None else lookups)

    def ahead(self, look: Look) -> None:
        """Begin to read the rows that are not in DRAM, and return. Nothing has to follow. ``StoreError`` if a
        disk fails at once."""
        if look.missed:
            for tier, rows in self._cold(look):
                tier.ahead(rows)

    def at_hand(self, look: Look) -> bool:
        """Whether all of its rows are in DRAM, and none of them still comes from the disk."""
        if not len(look.cold):  # if one loses its slot before it is scored, it is read then
            return True
        with self.shared.using:
            return self.settled(look)

    @contextmanager
    def found(self, look: Look) -> Iterator[RowIds]:
        """The place in its tier's buffer of each row that a batch looks up, int64 [N]; -1 for a pruned one.
        They are valid in the block. ``StoreError`` if a row cannot be read."""
        if look.missed:
            for tier in self.tiers:
                tier.land()
        with self.shared.using:
            reads, admission = self.shared.reads, self.shared.admission
            reads.batches += 1
            reads.lookups += look.lookups
            reads.missed += look.missed
            if admission is not None:
                admission.note(look.rows, look.rows[look.cold] if len(look.cold) else look.cold)
                if admission.due and not self._closed and (self.change is None or self.change.done()):
                    self.change = self._thread.submit(self._exchange, admission.begin())
            if self.settled(look):
                yield look.places
                return
        with ExitStack() as held:
            for tier in self.tiers:
                held.enter_context(tier.reading)
            while True:
                for tier, rows in self._cold(look):
                    tier.read(rows)
                with self.shared.using:
                    if self.settled(look):  # rows may have lost their slots since they were read
                        yield look.places
                        return

    def settled(self, look: Look) -> bool:
        """Bring ``look`` up to date, with ``using`` held; whether all of its rows are in DRAM then."""
        index = self.shared.index
        if look.version != index.version:
            look.places, look.cold = index.find(look.rows)
            look.version = index.version
        elif len(look.cold):  # other rows have kept their slots
            look.places[look.cold] = index.find(look.rows[look.cold])[0]
        return not len(look.cold) or bool(look.places[look.cold].min() != EMPTY)

    def _cold(self, look: Look) -> Iterator[tuple[TieredRows, RowIds]]:
        """For each tier the rows without a slot, by its own numbers."""
        rows = look.rows[look.cold]
        for tier, end in zip(self.tiers, self._ends, strict=True):
            own = rows if len(self.tiers) == 1 else rows[(rows >= tier.first) & (rows < end)]
            if len(own):
                yield tier, own - tier.first

    def _exchange(self, missed: RowIds) -> None:
        if not self.moving.acquire(blocking=False):  # newer rows come; there will be another exchange
            return
        try:
            for tier in self.tiers:
                tier.exchange(missed)
        finally:
            self.moving.release()

    # -- newer rows, all at once -----------------------------------------------------------------

    def stage(self, newer: Sequence[Newer]) -> None:
        """Put ``newer`` rows beside those that lookups find, which go on; ``swap`` lets them find these.
        Nothing else may be staged."""
        assert self._staged is None
        self.moving.acquire()
        index, slots, places = self.shared.index, [], []
        try:
            for tier, rows, values in newer:
                slots.append(index.slots_of(rows + tier.first))
                places.append(tier.put_beside(values))
            state = index.changed(_numbers(newer), _joined(places), np.empty(0, np.int64))
            self._staged = _Staged(newer, slots, state)
        except BaseException:
            self.moving.release()
            raise

    def unstage(self) -> None:
        """Give up what is staged and not found yet."""
        if self._staged is not None and not self._staged.found:
            self._ended()

    def swap(self) -> None:
        """Let lookups find what is staged, from the next one on; between two batches."""
        if self._staged is None:
            return
        with self.shared.using:
            self.shared.index.become(self._staged.state)
            self._staged.found = True
            for tier, rows, _ in self._staged.newer:
                tier.changes += 2  # what is being read is of the time before
                self.shared.reads.replaced += len(rows)

    def settle(self) -> int:
        """Write the rows that lookups find since ``swap`` to the SSD and into the slots that they had;
        returns how many bytes were written. ``StoreError`` if the disk fails: lookups go on to find the rows
        where they are, and no others are staged before these are written."""
        staged, index, before = self._staged, self.shared.index, self._written
        if staged is None or not staged.found:
            return 0
        for (tier, rows, values), slots in zip(staged.newer, staged.slots, strict=True):
            tier.write(rows, values.numpy(), slots)
        rows, slots = _numbers(staged.newer), _joined(staged.slots)
        for start in range(0, len(rows), FORGOTTEN):  # what was read of them before
            with self.shared.using:
                index.forget(rows[start : start + FORGOTTEN])
        stay = slots >= 0
        state = index.changed(rows[stay], slots[stay], rows[~stay])
        with self.shared.using:
            index.become(state)
        self._ended()
        return self._written - before

    @property
    def _written(self) -> int:
        return sum(tier.bytes_written for tier in self.tiers)

    def _ended(self) -> None:
        assert self._staged is not None
        for tier, _, _ in self._staged.newer:
            tier.give_back_spare()
        self._staged = None
        self.moving.release()

    @property
    def dram_bytes(self) -> int:
        """What tiers take, the index, and the counts of lookups."""
        index, admission = self.shared.index, self.shared.admission
        counts = 0 if admission is None else admission.nbytes
        return sum(tier.dram_bytes for tier in self.tiers) + index.nbytes + index.held_nbytes + counts

    def close(self) -> None:
        """Wait for reads and close the stores. Calling it again does nothing."""
        self._closed = True
        for tier in self.tiers:
            tier.closed = True
        self._thread.shutdown(wait=True)
        for tier in self.tiers:
            tier.close()


def _numbers(newer: Sequence[Newer]) -> RowIds:
    """The rows by their numbers over all tiers."""
    return np.concatenate([np.empty(0, np.int64), *(rows + tier.first for tier, rows, _ in newer)])


def _joined(places: Sequence[Places]) -> Places:
    return np.concatenate([np.empty(0, np.int32), *places])
