"""LRU: the rows that were not looked up for longest give way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from recpipe.common.loops import compiled
from recpipe.common.saved import within
from recpipe.plugin.bags import RowIds, Slots
from recpipe.plugin.policy import CachePolicy, Placement, RowSpace


class Lru(CachePolicy):
    """Least recently used, in units of batches; every missed row is admitted as long as there are slots.

    ``stamp`` has the last batch that looked up each slot. ``ring`` has slots in the order of those lookups;
    an entry is out of date once its slot has a newer stamp.
    """

    each_once = True

    def __init__(self, space: RowSpace) -> None:
        super().__init__(space)
        self.stamp = np.full(space.slots, -1, np.int32)
        self.ring_slot = np.zeros(2 * space.slots, np.int32)
        self.ring_stamp = np.zeros(2 * space.slots, np.int32)
        self.head = self.tail = self.used = self.step = 0

    def admit(self, hits: Slots, misses: RowIds, looked_up: RowIds) -> Placement:
        """Put the misses where the oldest rows are."""
        self._compact(min(len(hits), self.space.slots) + len(misses))
        self.step += 1
        ring = self.stamp, self.ring_slot, self.ring_stamp
        hits = _distinct(self.stamp, self.step, hits)
        fresh = np.arange(self.used, min(self.space.slots, self.used + len(misses)), dtype=np.int32)
        self.used += len(fresh)
        victims, self.head = _oldest(*ring, self.head, self.tail, len(misses) - len(fresh))
        slots = np.concatenate((fresh, victims)) if len(fresh) else victims
        self.tail = _append(*ring, self.tail, self.step, np.concatenate((hits, slots)))
        return Placement(slots, misses[: len(slots)])

    def _compact(self, room: int) -> None:
        """Drop outdated entries when the ring is nearly full; at most one entry per slot remains."""
        if self.tail + room <= len(self.ring_slot):
            return
        self.tail = _compact(self.stamp, self.ring_slot, self.ring_stamp, self.head, self.tail)
        self.head = 0
        if self.tail + room > len(self.ring_slot):
            size = self.tail + room
            self.ring_slot = np.resize(self.ring_slot, size)
            self.ring_stamp = np.resize(self.ring_stamp, size)

    def _live(self) -> tuple[Slots, Slots]:
        """The ring's entries that are not out of date: slots and stamps, oldest first."""
        part = slice(self.head, self.tail)
        valid = self.stamp[self.ring_slot[part]] == self.ring_stamp[part]
        return self.ring_slot[part][valid], self.ring_stamp[part][valid]

    def state_dict(self) -> dict[str, Any]:
        """Stamps and the live part of the ring."""
        ring_slot, ring_stamp = self._live()
        return {
            "stamp": self.stamp,
            "ring_slot": ring_slot,
            "ring_stamp": ring_stamp,
            "used": self.used,
            "step": self.step,
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises ``Damaged`` if ``state`` cannot be a result of ``state_dict()``; called before anything is
        loaded."""
        super().check_state(state)
        slots, steps = self.space.slots, np.iinfo(np.int32).max
        within(state, "stamp", -1, steps, size=slots)
        within(state, "ring_slot", 0, slots)
        within(state, "ring_stamp", -1, steps, size=len(state["ring_slot"]))
        within(state, "used", 0, slots + 1)
        within(state, "step", 0, steps)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from those stamps."""
        self.stamp = state["stamp"]
        self.head, self.tail = 0, len(state["ring_slot"])
        size = max(len(self.ring_slot), self.tail)
        self.ring_slot, self.ring_stamp = np.zeros(size, np.int32), np.zeros(size, np.int32)
        self.ring_slot[: self.tail], self.ring_stamp[: self.tail] = state["ring_slot"], state["ring_stamp"]
        self.used, self.step = int(state["used"]), int(state["step"])


@compiled
def _distinct(stamp: Slots, step: int, hits: Slots) -> Slots:
    """The distinct slots among ``hits``, in the order of their numbers; they are stamped with ``step``."""
    slots = np.empty(min(len(hits), len(stamp)), np.int32)
    count = 0
    for slot in hits:
        if stamp[slot] != step:
            stamp[slot] = step
            slots[count] = slot
            count += 1
    # Sorted by the lower half of the bits, then by the upper one: no pass over all slots, nor comparisons.
    bits = 1
    while (1 << 2 * bits) < len(stamp):
        bits += 1
    low = (1 << bits) - 1
    target = np.empty(count, np.int32)
    for shift in (0, bits):
        ends = np.zeros(low + 2, np.int64)
        for i in range(count):
            ends[(slots[i] >> shift & low) + 1] += 1
        for part in range(low + 1):
            ends[part + 1] += ends[part]
        for i in range(count):
            part = slots[i] >> shift & low
            target[ends[part]] = slots[i]
            ends[part] += 1
        slots, target = target, slots
    return slots[:count]


@compiled
def _append(stamp: Slots, ring_slot: Slots, ring_stamp: Slots, tail: int, step: int, slots: Slots) -> int:
    """Stamp distinct ``slots`` with ``step`` and append them; returns the ring's new end."""
    for slot in slots:
        stamp[slot] = step
        ring_slot[tail], ring_stamp[tail] = slot, step
        tail += 1
    return tail


@compiled
def _oldest(
    stamp: Slots, ring_slot: Slots, ring_stamp: Slots, head: int, tail: int, wanted: int
) -> tuple[Slots, int]:
    """Up to ``wanted`` slots with the oldest stamps, and the ring's new start."""
    found = np.empty(wanted, np.int32)
    count = 0
    while count < wanted and head < tail:
        slot = ring_slot[head]
        if stamp[slot] == ring_stamp[head]:
            found[count] = slot
            count += 1
        head += 1
    return found[:count], head


@compiled
def _compact(stamp: Slots, ring_slot: Slots, ring_stamp: Slots, head: int, tail: int) -> int:
    """Move the entries that are not out of date to the ring's start; returns their number."""
    count = 0
    for i in range(head, tail):
        if stamp[ring_slot[i]] == ring_stamp[i]:
            ring_slot[count], ring_stamp[count] = ring_slot[i], ring_stamp[i]
            count += 1
    return count
