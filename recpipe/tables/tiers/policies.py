"""The built-in cache policies: none, a fixed hot set, and the strong baselines LRU and LFU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recpipe.common.loops import ALONE, Spread, compiled
from recpipe.common.saved import Damaged, within
from recpipe.plugin.bags import RowIds, Slots
from recpipe.plugin.policy import NOTHING, CachePolicy, Placement, RowSpace
from recpipe.plugin.residents import MOST


class NoCache(CachePolicy):
    """Every row is fetched and written back in every batch: the papers' parameter-server baseline."""

    each_once = True

    def state_dict(self) -> dict[str, Any]:
        """No state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """No state."""


class ChosenRows(CachePolicy):
    """Keeps a set of rows chosen beforehand; a subclass decides when they become resident."""

    each_once = True
    target: RowIds
    """The set, sorted; at most ``space.slots`` rows."""

    def state_dict(self) -> dict[str, Any]:
        """The set. Core saves which rows are resident."""
        return {"target": self.target}

    def check_state(self, state: Mapping[str, Any]) -> None:
        super().check_state(state)
        within(state, "target", 0, self.space.rows)
        if len(state["target"]) > self.space.slots or (np.diff(state["target"]) <= 0).any():
            raise Damaged(f"target is no set of at most {self.space.slots} rows, sorted")


class HotSet(ChosenRows):
    """A fixed set of resident rows, replaced only by ``retarget``; at most ``chunk`` rows move per batch.

    Rows of the new set that are already resident stay in their slots. Migration is spread over several
    batches, so that its buffers stay small.
    """

    def __init__(self, space: RowSpace, rows: RowIds | None = None, chunk: int = 65_536) -> None:
        super().__init__(space)
        self.target, self.chunk = NOTHING.rows, chunk
        self._moves = NOTHING
        """Rows of the target that still have to move in, as far as they have been determined."""
        self._settled = False
        if rows is not None:
            self.retarget(rows)

    def retarget(self, rows: RowIds) -> int:
        """Make ``rows`` (distinct, at most ``space.slots``) the resident set; returns how many move in."""
        assert len(rows) <= self.space.slots, "a hot set must fit the resident budget"
        self.target = np.sort(rows)
        self._moves, self._settled = NOTHING, False
        return int((self.space.residents.slot_of(self.target) < 0).sum())

    def migrate(self, rows: RowIds) -> Placement:
        """Place the next rows of the target; called for each batch until none is missing."""
        if self._settled:
            return NOTHING
        if not len(self._moves.rows):
            # Rows that are not resident get first empty slots, then those of rows outside of the target.
            held = self.space.residents.row_of_slot
            incoming = self.target[self.space.residents.slot_of(self.target) < 0]
            leaving = np.flatnonzero((held >= 0) & ~np.isin(held, self.target))
            slots = np.concatenate((np.flatnonzero(held < 0), leaving))[: len(incoming)]
            self._moves = Placement(slots.astype(np.int32), incoming)
            self._settled = not len(incoming)
        moves, chunk = self._moves, self.chunk
        self._moves = Placement(moves.slots[chunk:], moves.rows[chunk:])
        return Placement(moves.slots[:chunk], moves.rows[:chunk])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with that set."""
        self.retarget(state["target"])


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
        room = min(len(hits), self.space.slots) + len(misses)
        if self.tail + room > len(self.ring_slot):
            # Outdated entries are dropped; at most one entry per slot remains.
            self.tail = _compact(self.stamp, self.ring_slot, self.ring_stamp, self.head, self.tail)
            self.head, size = 0, self.tail + room
            if size > len(self.ring_slot):
                self.ring_slot = np.resize(self.ring_slot, size)
                self.ring_stamp = np.resize(self.ring_stamp, size)
        self.step += 1
        slots, self.head, self.tail, self.used = _admit(
            *(self.stamp, self.ring_slot, self.ring_stamp, self.head, self.tail, self.used, self.step),
            *(hits, len(misses)),
        )
        return Placement(slots, misses[: len(slots)])

    def state_dict(self) -> dict[str, Any]:
        """Stamps and the live part of the ring."""
        part = slice(self.head, self.tail)
        live = self.stamp[self.ring_slot[part]] == self.ring_stamp[part]
        return {
            "stamp": self.stamp,
            "ring_slot": self.ring_slot[part][live],
            "ring_stamp": self.ring_stamp[part][live],
            "used": self.used,
            "step": self.step,
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
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


class Lfu(CachePolicy):
    """Least frequently used, with counts kept for all rows: a missed row replaces a resident one only
    when it has been looked up more often (the rule of FBGEMM's LFU cache).

    A row's count is its note (``recpipe.plugin.residents``), exact up to 1,073,741,823, where it stays.
    Victims come from a list of the least used slots, which is rebuilt when it is used up. Slots whose count
    has grown since are skipped.
    """

    each_once = True

    def __init__(self, space: RowSpace) -> None:
        super().__init__(space)
        self.notes = space.residents.keep_notes()
        self.candidates, self.candidate_counts = NOTHING.slots, NOTHING.slots
        self.next = self.used = 0

    def admit(self, hits: Slots, misses: RowIds, looked_up: RowIds) -> Placement:
        """Pair the most frequent misses with the least frequent residents."""
        self.notes.add(looked_up, self.times)
        of_slot, counts = self.notes.of_slot, self.notes[misses]
        order = np.argsort(-counts, kind="stable")
        wanted, counts = misses[order], counts[order]
        fresh = np.arange(self.used, min(self.space.slots, self.used + len(wanted)), dtype=np.int32)
        rest, victims = wanted[len(fresh) :], NOTHING.slots
        if len(rest) and self.used:
            if self.next + len(rest) > len(self.candidates):  # list the least used slots, least used first
                size = min(max(4 * len(rest), self.used // 8), self.used)
                least = np.argpartition(of_slot[: self.used], size - 1)[:size]
                least = least[np.lexsort((least, of_slot[least]))]
                self.candidates, self.candidate_counts = least.astype(np.int32), of_slot[least]
                self.next = 0
            window = slice(self.next, self.next + len(rest))
            victims = self.candidates[window]
            self.next += len(victims)
            # Slots hit in this batch have a higher count than when they were listed.
            same = of_slot[victims] == self.candidate_counts[window]
            victims = victims[same & ~np.isin(victims, hits)]
        self.used += len(fresh)
        better = counts[len(fresh) :][: len(victims)] > of_slot[victims]
        victims = victims[: int(better.argmin()) if not better.all() else len(better)]
        slots = np.concatenate((fresh, victims))
        return Placement(slots, wanted[: len(slots)])

    def state_dict(self) -> dict[str, Any]:
        """Counts and the list of victims."""
        return {
            "counts": self.notes[:],
            "candidates": self.candidates,
            "candidate_counts": self.candidate_counts,
            "next": self.next,
            "used": self.used,
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        super().check_state(state)
        within(state, "counts", 0, size=self.space.rows)
        within(state, "used", 0, self.space.slots + 1)
        within(state, "candidates", 0, self.space.slots)
        within(state, "candidate_counts", 0, size=len(state["candidates"]))
        within(state, "next", 0, len(state["candidates"]) + 1)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from those counts."""
        self.notes[:] = np.minimum(state["counts"], MOST)
        self.candidates, self.candidate_counts = state["candidates"], state["candidate_counts"]
        self.next, self.used = int(state["next"]), int(state["used"])


def add_lookups(counts: NDArray[np.int32], rows: RowIds, times: NDArray[np.int32] | None) -> None:
    """Count in ``counts`` (by row) how often a batch looks up ``rows``, as ``CachePolicy.times`` says."""
    _count(counts, rows, NOTHING.slots if times is None else times)


@compiled
def _count(counts: NDArray[np.int32], rows: RowIds, times: NDArray[np.int32]) -> None:
    """``times``: how often each is looked up; empty: once."""
    each = len(times) > 0
    for i in range(len(rows)):
        if not 0 <= rows[i] < len(counts):
            raise IndexError("a row that is in no table")
        counts[rows[i]] += times[i] if each else 1


def distinct_slots(slots: Slots, count: int, spread: Spread = ALONE) -> Slots:
    """The distinct values of ``slots`` (each in [0, count)), sorted."""
    seen = np.zeros(count, bool)
    spread.map(lambda part: _see(seen, slots[part]), spread.parts(len(slots)))
    return np.flatnonzero(seen).astype(np.int32)


@compiled
def _see(seen: NDArray[np.bool_], slots: Slots) -> None:
    for slot in slots:
        if not 0 <= slot < len(seen):
            raise IndexError("a slot that does not exist")
        seen[slot] = True


@compiled
def _admit(
    stamp: Slots,
    ring_slot: Slots,
    ring_stamp: Slots,
    head: int,
    tail: int,
    used: int,
    step: int,
    hits: Slots,
    misses: int,
) -> tuple[Slots, int, int, int]:
    """Slots for so many ``misses``, or as many as there are: unused ones, then those looked up longest ago.
    They and the ``hits`` are stamped with ``step`` and appended. Returns the slots, the ring's new start and
    end, and how many slots are used."""
    looked_up = _distinct(stamp, step, hits)
    slots = np.empty(misses, np.int32)
    count = 0
    while count < misses and used < len(stamp):
        slots[count] = used
        count += 1
        used += 1
    while count < misses and head < tail:
        slot = ring_slot[head]
        if stamp[slot] == ring_stamp[head]:
            slots[count] = slot
            count += 1
        head += 1
    slots = slots[:count]
    for slot in looked_up:
        ring_slot[tail], ring_stamp[tail] = slot, step
        tail += 1
    for slot in slots:
        stamp[slot] = step
        ring_slot[tail], ring_stamp[tail] = slot, step
        tail += 1
    return slots, head, tail, used


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
def _compact(stamp: Slots, ring_slot: Slots, ring_stamp: Slots, head: int, tail: int) -> int:
    """Move the entries that are not out of date to the ring's start; returns their number."""
    count = 0
    for i in range(head, tail):
        if stamp[ring_slot[i]] == ring_stamp[i]:
            ring_slot[count], ring_stamp[count] = ring_slot[i], ring_stamp[i]
            count += 1
    return count


def policy_bytes(policy: CachePolicy) -> int:
    """Bytes of host memory of a policy: its own arrays, and what it says to take beside them."""
    arrays = sum(v.nbytes for v in vars(policy).values() if isinstance(v, np.ndarray))
    return arrays + policy.waiting_bytes


POLICIES: dict[str, type[CachePolicy]] = {"nocache": NoCache, "lru": Lru, "lfu": Lfu}
"""The values of ``tiers.policy`` besides ``resident`` (no cold tier)."""
BYTES_BESIDE = {"nocache": (0, 0), "lru": (0, 20), "lfu": (0, 4)}
"""Host bytes of each of them for a row, and for a row that can be resident."""
