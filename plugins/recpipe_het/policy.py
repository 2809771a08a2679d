"""LFUOpt: HET's cache policy with permanent rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recpipe.kit import distinct_slots, within
from recpipe.plugin import CachePolicy, Placement, RowIds, RowSpace, Slots

PERMANENT_USES = 10
"""After so many uses (batches that look it up) a row is never evicted, as in HET's code."""
NONE: Slots = np.empty(0, np.int32)


class LfuOpt(CachePolicy):
    """Least frequently used, with uses counted up to 10; a row that reaches this stays for good. Among rows
    with equal counts the least recently used is evicted. If permanent rows fill the cache, misses are not
    admitted.

    For each number of uses there is a list of its oldest slots, made anew when it is used up, so that most
    batches search no more than that. An entry is out of date once its slot has been used or refilled.
    """

    each_once = True

    def __init__(self, space: RowSpace) -> None:
        super().__init__(space)
        self.uses = np.zeros(space.slots, np.int8)
        self.stamp = np.zeros(space.slots, np.int32)
        self.step = 0
        self._start_lists()

    def _start_lists(self) -> None:
        """Count the slots of each number of uses, and empty the lists."""
        self.members = np.bincount(self.uses, minlength=PERMANENT_USES + 1)
        self._oldest: list[tuple[Slots, Slots]] = [(NONE, NONE)] * PERMANENT_USES
        """For each number of uses: slots and their stamps, oldest first."""

    def admit(self, hits: Slots, misses: RowIds, looked_up: RowIds) -> Placement:
        """Put misses into empty slots, then into the slots of the least used rows that this batch does not
        use."""
        self.step += 1
        hits = distinct_slots(hits, self.space.slots)
        self._touch(hits, np.minimum(self.uses[hits] + 1, PERMANENT_USES).astype(np.int8))
        slots = self._claim(len(misses))
        return Placement(slots, misses[: len(slots)])

    def _touch(self, slots: Slots, uses: NDArray[np.int8]) -> None:
        """Note that this batch uses distinct ``slots``, and their new numbers of uses."""
        size = PERMANENT_USES + 1
        self.members += np.bincount(uses, minlength=size) - np.bincount(self.uses[slots], minlength=size)
        self.uses[slots], self.stamp[slots] = uses, self.step

    def _claim(self, wanted: int) -> Slots:
        """Up to ``wanted`` slots for new rows, least used and least recently used first; no permanent ones
        and none that this batch uses."""
        claimed = [NONE]
        for uses in range(PERMANENT_USES):
            while wanted and self.members[uses]:
                slots = self._take_listed(uses, wanted)
                self._touch(slots, np.ones(len(slots), np.int8))
                claimed.append(slots)
                wanted -= len(slots)
                if wanted and not self._list_again(uses, wanted):
                    break
        return np.concatenate(claimed)

    def _take_listed(self, uses: int, wanted: int) -> Slots:
        """Remove up to ``wanted`` slots from the list of those with so many uses."""
        slots, stamps = self._oldest[uses]
        valid = np.flatnonzero((self.uses[slots] == uses) & (self.stamp[slots] == stamps))[:wanted]
        end = int(valid[-1]) + 1 if wanted == len(valid) else len(slots)
        self._oldest[uses] = slots[end:], stamps[end:]
        return slots[valid]

    def _list_again(self, uses: int, wanted: int) -> bool:
        """List the oldest slots with so many uses that this batch does not use; whether there are any."""
        slots = np.flatnonzero(self.uses == uses).astype(np.int32)
        slots = slots[self.stamp[slots] < self.step]
        size = min(len(slots), max(4 * wanted, len(slots) // 8))
        if not size:
            return False
        # Distinct keys, so that the choice does not depend on how numpy breaks ties.
        key = self.stamp[slots].astype(np.int64) * self.space.slots + slots
        least = np.argpartition(key, size - 1)[:size]
        slots = slots[least[np.argsort(key[least])]]
        self._oldest[uses] = slots, self.stamp[slots]
        return True

    def state_dict(self) -> dict[str, Any]:
        """Uses and last uses of the slots."""
        return {"uses": self.uses, "stamp": self.stamp, "step": self.step}

    def check_state(self, state: Mapping[str, Any]) -> None:
        super().check_state(state)
        slots = self.space.slots
        within(state, "uses", 0, PERMANENT_USES + 1, size=slots)
        within(state, "step", 0, np.iinfo(np.int32).max)
        within(state, "stamp", 0, state["step"] + 1, size=slots)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self.uses, self.stamp, self.step = state["uses"], state["stamp"], int(state["step"])
        self._start_lists()
