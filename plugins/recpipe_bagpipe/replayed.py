"""The lookahead policy on ids that were read before, to see what it moves; nothing is read for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from recpipe_perf_model import KeptLookups

from recpipe.plugin import CachePolicy, IndexBags, Placement, RowIds, RowSpace, Slots, distinct
from recpipe_bagpipe.pace import Pace
from recpipe_bagpipe.policy import Lookahead, NoBulk


class Replayed(CachePolicy):
    """Decides as ``Lookahead`` does in groups of at most ``batches``."""

    def __init__(self, space: RowSpace, kept: KeptLookups, batches: int) -> None:
        super().__init__(space)
        pace = Pace(batches, memory=0, record_bytes=0, waited=lambda: 0.0)
        self._policy = Lookahead(space, _rows_of, NoBulk(), pace)
        # The policy asks nothing of batches but their lookups, so that these stand for them.
        source: Iterator[Any] = map(kept.bags, range(len(kept.batches)))
        self._stream = self._policy.stream(source)

    def migrate(self, rows: RowIds) -> Placement:
        """Let ``Lookahead`` see the batch, and move what it moves."""
        next(self._stream)
        return self._policy.migrate(rows)

    def admit(self, hits: Slots, misses: RowIds, looked_up: RowIds) -> Placement:
        """Give every miss a free slot, or that of the row which is worth least."""
        return self._policy.admit(hits, misses, looked_up)

    def state_dict(self) -> dict[str, Any]:
        """How often and when the row in each slot was looked up."""
        return self._policy.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the resident rows; batch numbers start again."""
        self._policy.load_state_dict(state)


def _rows_of(bags: IndexBags) -> RowIds:
    return distinct(bags.indices)
