"""LFUOpt: HET's cache policy with permanent rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from recpipe.embedding.policies import CachePolicy, Placement, RowIds, RowSpace, Slots, distinct

PERMANENT_USES = 10
"""Uses (batches that look a row up) after which it is never evicted, as in HET's code."""


class LfuOpt(CachePolicy):
    """Least frequently used, counted up to 10 uses: a row that reaches them stays for good. Among equals
    the least recently used goes; when permanent rows fill the cache, misses are not admitted."""

    def __init__(self, space: RowSpace) -> None:
        super().__init__(space)
        self.uses = np.zeros(space.slots, np.int64)
        self.stamp = np.zeros(space.slots, np.int64)
        self.step = 0
        self._before: dict[str, Any] | None = None

    def admit(self, hits: Slots, misses: RowIds, looked_up: RowIds) -> Placement:
        """Put misses into empty slots, then where the least used rows are that this batch does not use."""
        self._before = {name: np.copy(value) for name, value in self.state_dict().items()}
        self.step += 1
        hits = distinct(hits, self.space.slots)
        self.uses[hits] = np.minimum(self.uses[hits] + 1, PERMANENT_USES)
        self.stamp[hits] = self.step
        free = self.uses < PERMANENT_USES
        free[hits] = False
        candidates = np.flatnonzero(free)
        order = np.lexsort((candidates, self.stamp[candidates], self.uses[candidates]))
        slots = candidates[order[: len(misses)]].astype(np.int32)
        self.uses[slots], self.stamp[slots] = 1, self.step
        return Placement(slots, misses[: len(slots)])

    def undo(self) -> None:
        """Restore uses and stamps."""
        if self._before is not None:
            self.load_state_dict(self._before)

    def state_dict(self) -> dict[str, Any]:
        """Uses and last uses of the slots."""
        return {"uses": self.uses, "stamp": self.stamp, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from those."""
        self.uses, self.stamp, self.step = state["uses"], state["stamp"], int(state["step"])
        self._before = None
