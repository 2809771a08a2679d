"""LFUOpt: HET's cache policy with permanent rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from recpipe.kit import distinct_slots, within
from recpipe.plugin import CachePolicy, Placement, RowIds, RowSpace, Slots

PERMANENT_USES = 10
"""After so many uses (batches that look it up) a row is never evicted, as in HET's code."""


class LfuOpt(CachePolicy):
    """Least frequently used, with uses counted up to 10; a row that reaches this stays for good. Among rows
    with equal counts the least recently used is evicted. If permanent rows fill the cache, misses are not
    admitted."""

    def __init__(self, space: RowSpace) -> None:
        super().__init__(space)
        self.uses = np.zeros(space.slots, np.int64)
        self.stamp = np.zeros(space.slots, np.int64)
        self.step = 0

    def admit(self, hits: Slots, misses: RowIds, looked_up: RowIds) -> Placement:
        """Put misses into empty slots, then into the slots of the least used rows that this batch does not
        use."""
        hits = distinct_slots(hits, self.space.slots)
        slots = self._least_used(len(misses), hits)
        touched = np.concatenate((hits, slots))
        self.step += 1
        self.uses[hits] = np.minimum(self.uses[hits] + 1, PERMANENT_USES)
        self.uses[slots] = 1
        self.stamp[touched] = self.step
        return Placement(slots, misses[: len(slots)])

    def _least_used(self, wanted: int, hits: Slots) -> Slots:
        """Up to ``wanted`` slots, least used and least recently used first; no permanent ones or ``hits``."""
        if not wanted:
            return np.empty(0, np.int32)
        count = self.space.slots
        # Distinct keys, so that the choice does not depend on how numpy breaks ties.
        key = (self.uses * (self.step + 1) + self.stamp) * count + np.arange(count)
        kept = self.uses >= PERMANENT_USES
        kept[hits] = True
        key[kept] = np.iinfo(np.int64).max
        wanted = min(wanted, count - int(kept.sum()))
        least = np.argpartition(key, wanted - 1)[:wanted] if wanted else np.empty(0, np.int64)
        return least[np.argsort(key[least])].astype(np.int32)

    def state_dict(self) -> dict[str, Any]:
        """Uses and last uses of the slots."""
        return {"uses": self.uses, "stamp": self.stamp, "step": self.step}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """As in ``CachePolicy``."""
        super().check_state(state)
        slots = self.space.slots
        within(state, "uses", 0, PERMANENT_USES + 1, size=slots)
        within(state, "step", 0, np.iinfo(np.int32).max)
        within(state, "stamp", 0, state["step"] + 1, size=slots)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self.uses, self.stamp, self.step = state["uses"], state["stamp"], int(state["step"])
