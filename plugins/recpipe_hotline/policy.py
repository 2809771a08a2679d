"""Hotline's learning phase: finds popular rows by sampled access counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recpipe.kit import compiled, distinct_slots, top_rows, within
from recpipe.plugin import NOTHING, CachePolicy, Notes, Placement, RowIds, RowSpace, Slots

ONE, POPULAR = 2, 1
"""Of a row's note: what a lookup adds to it, and the mark of a row that the last learning found popular."""
HIGHEST = (1 << 29) - 1
"""The highest count."""
CHUNK = 1 << 20
"""Rows whose notes are changed at a time."""


@dataclass(frozen=True)
class Learning:
    """When popularity is learned, in batches; see the plugin's yaml."""

    learn_batches: int
    growth: float
    relearn_every: int
    sample: float
    decay: int


class PopularRows(CachePolicy):
    """Keeps popular rows resident: those with the highest access counts, as many as the budget holds.

    A row enters its slot from the slab, where a batch has just used it, so that migration reads
    nothing from the store. While slots are empty, every such row gets one. Once slots are full, rows that the
    last learning found popular replace rows that it did not. After a learning the counts are divided by
    ``decay``, so that old popularity fades.

    Counts and marks are the rows' notes (``Residents.keep_notes``), so that they take no memory for a row. A
    count is exact up to ``HIGHEST`` lookups, at which it stays until the next learning.
    """

    each_once = True

    def __init__(self, space: RowSpace, learning: Learning) -> None:
        super().__init__(space)
        self.learning = learning
        self.notes = space.residents.keep_notes()
        self.unpopular = NOTHING.slots
        """Slots with rows that the last learning did not find popular, least used first."""
        self.slab = NOTHING.rows
        """The rows of the last batch's slab."""
        self.used = self.replaced = self.replaced_rows = 0
        self.batch = 0
        self.next_learning = learning.learn_batches
        self.learnings = 0
        self.hits = self.lookups = 0
        self.rows_kept = 0
        """How many distinct resident rows batches used. Without resident rows, each would have been fetched
        and written back."""

    def migrate(self, rows: RowIds) -> Placement:
        """Count the batch, learn when it is time, and promote rows from the last batch's slab."""
        if self.batch >= self.next_learning:
            self._learn()
        every = max(1, round(1 / self.learning.sample))
        if self.batch % every == 0:
            self.notes.add(rows, self.times, ONE)
        self.batch += 1
        # Rows of the last slab get slots: any row an empty one, then popular ones those of unpopular rows.
        empty = np.arange(self.used, min(self.space.slots, self.used + len(self.slab)), dtype=np.int32)
        rest = self.slab[len(empty) :]
        marked = rest[self.notes[rest] & POPULAR > 0]
        chosen = marked[: len(self.unpopular) - self.replaced]
        victims = self.unpopular[self.replaced : self.replaced + len(chosen)]
        slots, rows = victims, chosen
        if len(empty):
            slots = np.concatenate((empty, victims))
            rows = np.concatenate((self.slab[: len(empty)], chosen))
        self.used += len(empty)
        self.replaced += len(chosen)
        self.replaced_rows += len(chosen)
        return Placement(slots, rows)

    def _learn(self) -> None:
        """Find the popular rows. While slots are empty there is nothing to choose."""
        if self.used < self.space.slots:
            return
        interval = min(self.learning.relearn_every, round(self.batch * (self.learning.growth - 1)))
        self.next_learning = self.batch + max(1, interval)
        held, spread = self.space.residents.row_of_slot, self.space.spread
        popular = top_rows(Counts(self.notes), self.space.slots, held, spread)
        of_slot = self.notes.of_slot
        of_slot -= of_slot & POPULAR
        self.notes[popular] = self.notes[popular] | POPULAR
        slots = np.flatnonzero(of_slot & POPULAR == 0).astype(np.int32)
        counts = of_slot[slots] // ONE
        if counts.max(initial=0) < 1 << 16:
            counts = counts.astype(np.uint16)  # which numpy puts in order ten times as fast
        self.unpopular = slots[np.argsort(counts, kind="stable")]
        self.replaced = 0
        self.learnings += 1
        spread.map(lambda part: self._renew(part, popular), spread.parts(len(self.notes)))

    def _renew(self, part: slice, popular: RowIds) -> None:
        """Let the counts of some rows fade, and mark those that are ``popular`` (sorted), and no others."""
        for start in range(part.start, part.stop, CHUNK):
            rows = slice(start, min(start + CHUNK, part.stop))
            notes = self.notes[rows] // ONE // self.learning.decay * ONE
            first, last = np.searchsorted(popular, (rows.start, rows.stop))
            notes[popular[first:last] - start] |= POPULAR
            self.notes[rows] = notes

    @property
    def counts(self) -> NDArray[np.int32]:
        """How often each row was looked up in the batches that are counted, int32 [rows]; a copy."""
        return self.notes[:] // ONE

    @counts.setter
    def counts(self, counts: NDArray[np.int32]) -> None:
        self.notes[:] = np.minimum(counts, HIGHEST) * ONE + (self.notes[:] & POPULAR)

    @property
    def popular(self) -> NDArray[np.bool_]:
        """Which rows the last learning found popular, bool [rows]; a copy."""
        return self.notes[:] & POPULAR > 0

    @popular.setter
    def popular(self, popular: NDArray[np.bool_]) -> None:
        self.notes[:] = self.notes[:] // ONE * ONE + popular

    def admit(self, hits: Slots, misses: RowIds, looked_up: RowIds) -> Placement:
        """All misses pass through the slab; the next batch's ``migrate`` may promote them."""
        self.slab = misses
        if self.times is None:
            self.hits, self.lookups = self.hits + len(hits), self.lookups + len(looked_up)
            self.rows_kept += len(distinct_slots(hits, self.space.slots, self.space.spread))
        else:
            lookups, missed = _lookups(looked_up, self.times, misses)
            self.hits, self.lookups = self.hits + lookups - missed, self.lookups + lookups
            self.rows_kept += len(hits)
        return NOTHING

    def state_dict(self) -> dict[str, Any]:
        """Counts and the learning schedule."""
        return {name: getattr(self, name) for name in _STATE}

    def check_state(self, state: Mapping[str, Any]) -> None:
        super().check_state(state)
        slots, rows = self.space.slots, self.space.rows
        within(state, "counts", 0, size=rows)
        within(state, "popular", 0, size=rows)
        within(state, "unpopular", 0, slots)
        within(state, "slab", 0, rows)
        within(state, "used", 0, slots + 1)
        within(state, "replaced", 0, len(state["unpopular"]) + 1)
        for name in ("batch", "next_learning", "learnings", "hits", "rows_kept", "lookups", "replaced_rows"):
            within(state, name, 0)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        for name, value in state.items():
            setattr(self, name, value)


class Counts:
    """The counts in a policy's ``notes``, as ``top_rows`` reads them."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes

    def __len__(self) -> int:
        return len(self.notes)

    def __getitem__(self, rows: slice | RowIds) -> NDArray[np.int32]:
        return self.notes[rows] // ONE


@compiled
def _lookups(rows: RowIds, times: NDArray[np.int32], misses: RowIds) -> tuple[int, int]:
    """How many lookups ``rows``, each looked up so many ``times``, have, and those of them that are
    ``misses``; both are sorted."""
    lookups = missed = at = 0
    for i in range(len(rows)):
        lookups += times[i]
        if at < len(misses) and misses[at] == rows[i]:
            missed += times[i]
            at += 1
    return lookups, missed


_STATE = (
    "counts",
    "popular",
    "unpopular",
    "slab",
    "used",
    "replaced",
    "replaced_rows",
    "batch",
    "next_learning",
    "learnings",
    "hits",
    "rows_kept",
    "lookups",
)
"""The entries of the policy in a checkpoint."""
