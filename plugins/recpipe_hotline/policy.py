"""Hotline's learning phase: which rows are popular, from sampled access counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from recpipe.embedding.policies import HotSet, Placement, RowIds, RowSpace, Slots
from recpipe.embedding.popularity import top_rows


@dataclass(frozen=True)
class Learning:
    """When popularity is learned, in batches; see the plugin's yaml."""

    learn_batches: int
    growth: float
    relearn_every: int
    sample: float
    decay: int


class PopularRows(HotSet):
    """The most looked-up rows are resident; learned after ``learn_batches``, again at growing intervals.

    Every ``1 / sample``-th batch is counted, and every one until the first learning, which is when
    counts are few. After each learning the counts are divided by ``decay``, so that old popularity
    fades; the division waits for the next batch because this one's plan may still be undone.
    """

    def __init__(self, space: RowSpace, learning: Learning, migrate_rows: int) -> None:
        super().__init__(space, chunk=migrate_rows)
        self.learning = learning
        self.counts = np.zeros(space.rows, np.int32)
        self.batch = 0
        self.next_learning = learning.learn_batches
        self.learnings = 0
        self.moved_rows = 0
        self.hits = self.lookups = 0
        self._fade = False
        self._counted: RowIds | None = None
        self._last_hits = (0, 0)
        self._before: tuple[Any, ...] = ()

    def migrate(self, rows: RowIds) -> Placement:
        """Learn when it is time, count the batch, and move the next rows."""
        if self._fade:
            self.counts //= self.learning.decay
            self._fade = False
        self._before = (
            self.row_of_slot,
            self._moves,
            self._done,
            self.next_learning,
            self.learnings,
            self.moved_rows,
        )
        if self.batch == self.next_learning:
            self._learn()
        every = max(1, round(1 / self.learning.sample))
        self._counted = rows if self.learnings == 0 or self.batch % every == 0 else None
        if self._counted is not None:
            np.add.at(self.counts, self._counted, 1)
        self.batch += 1
        placement = super().migrate(rows)
        self.moved_rows += len(placement.rows)
        return placement

    def _learn(self) -> None:
        """Make the rows with the highest counts the resident ones."""
        popular = top_rows(self.counts, self.space.slots, self.target)
        self.retarget(popular)
        self.learnings += 1
        interval = min(self.learning.relearn_every, round(self.batch * (self.learning.growth - 1)))
        self.next_learning = self.batch + max(1, interval)
        self._fade = self.learning.decay > 1

    def admit(self, hits: Slots, misses: RowIds, looked_up: RowIds) -> Placement:
        """Nothing beyond the popular set; lookups are counted for the report."""
        self._last_hits = (len(hits), len(looked_up))
        self.hits += len(hits)
        self.lookups += len(looked_up)
        return super().admit(hits, misses, looked_up)

    def undo(self) -> None:
        """Take back the last batch: its counts, its learning, its moves."""
        if self._counted is not None:
            np.subtract.at(self.counts, self._counted, 1)
        self._counted, self._fade = None, False
        hits, lookups = self._last_hits
        self.hits, self.lookups, self.batch = self.hits - hits, self.lookups - lookups, self.batch - 1
        (self.row_of_slot, self._moves, self._done, self.next_learning, self.learnings, self.moved_rows) = (
            self._before
        )

    def state_dict(self) -> dict[str, Any]:
        """Residents, moves under way, counts and the learning schedule."""
        return super().state_dict() | {
            "counts": self.counts,
            "batch": self.batch,
            "next_learning": self.next_learning,
            "learnings": self.learnings,
            "moved_rows": self.moved_rows,
            "hits": self.hits,
            "lookups": self.lookups,
            "fade": self._fade,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        super().load_state_dict(state)
        self.counts, self._fade = state["counts"], bool(state["fade"])
        self.batch, self.next_learning = int(state["batch"]), int(state["next_learning"])
        self.learnings, self.moved_rows = int(state["learnings"]), int(state["moved_rows"])
        self.hits, self.lookups = int(state["hits"]), int(state["lookups"])
