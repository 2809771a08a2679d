"""Hotline's learning phase: finds popular rows by sampled access counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recpipe.kit import add_lookups, compiled, distinct_slots, top_rows, within
from recpipe.plugin import NOTHING, CachePolicy, Placement, RowIds, RowSpace, Slots


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
    """

    each_once = True

    def __init__(self, space: RowSpace, learning: Learning) -> None:
        super().__init__(space)
        self.learning = learning
        self.counts = np.zeros(space.rows, np.int32)
        self.popular = np.zeros(space.rows, bool)
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
            add_lookups(self.counts, rows, self.times)
        self.batch += 1
        # Rows of the last slab get slots: any row an empty one, then popular ones those of unpopular rows.
        empty = np.arange(self.used, min(self.space.slots, self.used + len(self.slab)), dtype=np.int32)
        rest = self.slab[len(empty) :]
        chosen = _marked(self.popular, rest, len(self.unpopular) - self.replaced)
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
        self.popular = np.zeros(self.space.rows, bool)
        self.popular[top_rows(self.counts, self.space.slots, held, spread)] = True
        found = spread.map(
            lambda part: _unpopular(held[part], part.start, self.popular, self.counts),
            spread.parts(len(held)),
        )
        slots, counts = map(np.concatenate, zip(*found, strict=True))
        if counts.max(initial=0) < 1 << 16:
            counts = counts.astype(np.uint16)  # which numpy puts in order ten times as fast
        self.unpopular = slots[np.argsort(counts, kind="stable")]
        self.replaced = 0
        self.learnings += 1
        spread.map(self._fade, spread.parts(len(self.counts)))

    def _fade(self, part: slice) -> None:
        self.counts[part] //= self.learning.decay

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


@compiled
def _unpopular(
    held: RowIds, first: int, popular: NDArray[np.bool_], counts: NDArray[np.int32]
) -> tuple[Slots, NDArray[np.int32]]:
    """Of slots that hold the rows ``held``, numbered from ``first`` on, those whose row is not ``popular``,
    and these rows' ``counts``."""
    slots, own = np.empty(len(held), np.int32), np.empty(len(held), np.int32)
    found = 0
    for i in range(len(held)):
        slots[found], own[found] = first + i, counts[held[i]]
        found += not popular[held[i]]  # a branch that is hard to predict would wait for each row by itself
    return slots[:found], own[:found]


@compiled
def _marked(marks: NDArray[np.bool_], rows: RowIds, most: int) -> RowIds:
    """The first ``most`` of those ``rows`` that have a mark."""
    chosen = np.empty(len(rows), np.int64)
    count = 0
    for row in rows:
        if count < most and marks[row]:
            chosen[count] = row
            count += 1
    return chosen[:count]


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
