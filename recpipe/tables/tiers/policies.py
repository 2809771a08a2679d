"""Which rows are resident when: the built-in cache policies, and the contract for a plugin's own.

A policy sees each batch once, in order, before it is trained, and answers with a ``Placement``.
It moves nothing itself: ``recpipe.tables.tiers.placement`` and ``tiered`` carry placements out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recpipe.common.saved import Damaged, like, residents, within

Slots = NDArray[np.int32]
RowIds = NDArray[np.int64]


@dataclass(frozen=True)
class RowSpace:
    """What a policy may know: all rows of its group of tables by number, and how many can be resident."""

    bases: RowIds
    """Number of each table's row 0, and of the row after the last: int64 [T + 1]."""
    slots: int
    """Rows that ``tiers.resident_bytes`` holds."""
    group: int = 0
    """Number of the group of tables (``Context.groups``)."""

    @property
    def rows(self) -> int:
        """Rows of all tables together."""
        return int(self.bases[-1])


@dataclass(frozen=True)
class Placement:
    """From this batch on, ``slots[i]`` holds ``rows[i]``; what was there before goes to the cold store."""

    slots: Slots
    rows: RowIds
    freed: Slots = field(default_factory=lambda: np.empty(0, np.int32))
    """Slots that are emptied: their rows go to the cold store. None of them is in ``slots``."""


NOTHING = Placement(np.empty(0, np.int32), np.empty(0, np.int64))


class CachePolicy(ABC):
    """Decides placements. ``undo`` takes back the last batch's decisions: eval and checkpoints look at
    the state between two batches while the next one has been planned already."""

    def __init__(self, space: RowSpace) -> None:
        self.space = space

    def migrate(self, rows: RowIds) -> Placement:
        """Called first, with all global rows that the batch looks up (int64 [L], repeats included).

        Rows that the placement drops are looked up as cold ones in this batch.
        """
        return NOTHING

    def admit(self, hits: Slots, misses: RowIds, looked_up: RowIds) -> Placement:
        """Called second: ``hits`` are the slots looked up (int32 [H], with repeats), ``misses`` the
        distinct rows that are not resident (int64 [U]); ``looked_up`` as for ``migrate``.

        The placement's rows must be among ``misses`` and its slots not among ``hits``. Rows of
        ``misses`` that are not admitted pass through the slab for this batch alone.
        """
        return NOTHING

    @abstractmethod
    def undo(self) -> None:
        """Forget the last ``migrate`` and ``admit``; called at most once between two batches."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything that later decisions depend on: numpy arrays, numbers, strings.

        The same names and types in every state, so that a new policy's tells what a saved one may hold.
        """

    def check_state(self, state: Mapping[str, Any]) -> None:
        """``Damaged`` on what cannot be ``state_dict()``'s result; asked before anything is loaded.

        A policy whose state has numbers of rows or slots checks their range here as well.
        """
        like(self.state_dict(), state, "state")

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict()``'s result."""


class NoCache(CachePolicy):
    """Every row is fetched and written back in every batch: the papers' parameter-server baseline."""

    def undo(self) -> None:
        """Nothing was decided."""

    def state_dict(self) -> dict[str, Any]:
        """No state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """No state."""


class HotSet(CachePolicy):
    """A fixed set of resident rows, replaced only by ``retarget``; at most ``chunk`` rows move per batch.

    Rows of the new set that are resident already stay in their slots; migration takes as many
    batches as it needs, so that the buffers it passes through stay small.
    """

    def __init__(self, space: RowSpace, rows: RowIds | None = None, chunk: int = 65_536) -> None:
        super().__init__(space)
        self.chunk = chunk
        self.row_of_slot = np.full(space.slots, -1, np.int64)
        self._moves = NOTHING
        self._done = 0
        self._last = 0
        if rows is not None:
            self.retarget(rows)

    @property
    def target(self) -> RowIds:
        """The rows that are resident once all moves are done, sorted."""
        final = self.row_of_slot.copy()
        final[self._moves.slots] = self._moves.rows
        return np.sort(final[final >= 0])

    def retarget(self, rows: RowIds) -> int:
        """Make ``rows`` (distinct, at most ``space.slots``) the resident set; returns how many move in."""
        assert len(rows) <= self.space.slots, "a hot set must fit the resident budget"
        final = self.row_of_slot.copy()
        final[self._moves.slots[: self._done]] = self._moves.rows[: self._done]
        stays = np.isin(final, rows)
        incoming = np.sort(np.setdiff1d(rows, final[stays]))
        empty = np.flatnonzero(final < 0)
        leaving = np.flatnonzero(~stays & (final >= 0))
        slots = np.concatenate((empty, leaving))[: len(incoming)].astype(np.int32)
        self.row_of_slot, self._moves, self._done, self._last = final, Placement(slots, incoming), 0, 0
        return len(incoming)

    def migrate(self, rows: RowIds) -> Placement:
        """The next rows that move, oldest decision first."""
        part = slice(self._done, self._done + self.chunk)
        placement = Placement(self._moves.slots[part], self._moves.rows[part])
        self._last = len(placement.slots)
        self._done += self._last
        return placement

    def undo(self) -> None:
        """Take back the last move."""
        self._done -= self._last
        self._last = 0

    def state_dict(self) -> dict[str, Any]:
        """Resident rows and the moves still to be made."""
        return {
            "row_of_slot": self.row_of_slot,
            "move_slots": self._moves.slots,
            "move_rows": self._moves.rows,
            "done": self._done,
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """As in ``CachePolicy``."""
        super().check_state(state)
        residents(state, "row_of_slot", self.space.slots, self.space.rows)
        within(state, "move_slots", 0, self.space.slots)
        within(state, "move_rows", 0, self.space.rows, size=len(state["move_slots"]))
        within(state, "done", 0, len(state["move_slots"]) + 1)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with those rows and moves."""
        self.row_of_slot = state["row_of_slot"]
        self._moves = Placement(state["move_slots"], state["move_rows"])
        self._done, self._last = int(state["done"]), 0


class Lru(CachePolicy):
    """Least recently used, at the granularity of a batch; every missed row is admitted while slots last.

    ``stamp`` holds the last batch that looked a slot up; ``ring`` the slots in the order of those
    lookups, where an entry is out of date once its slot has a newer stamp.
    """

    def __init__(self, space: RowSpace) -> None:
        super().__init__(space)
        self.stamp = np.full(space.slots, -1, np.int32)
        self.ring_slot = np.zeros(2 * space.slots, np.int32)
        self.ring_stamp = np.zeros(2 * space.slots, np.int32)
        self.head = self.tail = self.used = self.step = 0
        self._before: tuple[int, int, int, int, Slots, Slots] | None = None

    def admit(self, hits: Slots, misses: RowIds, looked_up: RowIds) -> Placement:
        """Put the misses where the oldest rows are."""
        hits = distinct(hits, self.space.slots)
        self._compact(len(hits) + len(misses))
        before = (self.head, self.tail, self.used, self.step)
        self.step += 1
        old_hits = self.stamp[hits]
        self.stamp[hits] = self.step
        fresh = np.arange(self.used, min(self.space.slots, self.used + len(misses)), dtype=np.int32)
        self.used += len(fresh)
        victims = self._oldest(len(misses) - len(fresh))
        slots = np.concatenate((fresh, victims))
        touched = np.concatenate((hits, slots))
        self._before = (*before, touched, np.concatenate((old_hits, self.stamp[slots])))
        self.stamp[slots] = self.step
        end = self.tail + len(touched)
        self.ring_slot[self.tail : end] = touched
        self.ring_stamp[self.tail : end] = self.step
        self.tail = end
        return Placement(slots, misses[: len(slots)])

    def _oldest(self, wanted: int) -> Slots:
        """Up to ``wanted`` slots with the oldest stamps, none of them looked up in this batch."""
        found: list[Slots] = []
        while wanted > 0 and self.head < self.tail:
            end = min(self.tail, self.head + max(1024, 2 * wanted))
            slots = self.ring_slot[self.head : end]
            valid = np.flatnonzero(self.stamp[slots] == self.ring_stamp[self.head : end])
            taken = valid[:wanted]
            found.append(slots[taken])
            self.head = end if len(valid) <= wanted else self.head + int(taken[-1]) + 1
            wanted -= len(taken)
        return np.concatenate(found) if found else NOTHING.slots

    def _compact(self, room: int) -> None:
        """Drop outdated entries when the ring's end is near; at most one entry per slot remains."""
        if self.tail + room <= len(self.ring_slot):
            return
        slots, stamps = self._live()
        size = max(2 * self.space.slots, len(slots) + room)
        self.ring_slot, self.ring_stamp = np.zeros(size, np.int32), np.zeros(size, np.int32)
        self.ring_slot[: len(slots)], self.ring_stamp[: len(slots)] = slots, stamps
        self.head, self.tail = 0, len(slots)

    def _live(self) -> tuple[Slots, Slots]:
        """The ring's entries that are not out of date: slots and stamps, oldest first."""
        part = slice(self.head, self.tail)
        valid = self.stamp[self.ring_slot[part]] == self.ring_stamp[part]
        return self.ring_slot[part][valid], self.ring_stamp[part][valid]

    def undo(self) -> None:
        """Restore stamps and the ring's ends."""
        if self._before is not None:
            self.head, self.tail, self.used, self.step, touched, stamps = self._before
            self.stamp[touched] = stamps
            self._before = None

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
        """As in ``CachePolicy``."""
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
        self._before = None


class Lfu(CachePolicy):
    """Least frequently used, with counts kept for all rows: a missed row replaces a resident one only
    when it has been looked up more often (the rule of FBGEMM's LFU cache).

    Victims come from a list of the least used slots that is made anew when it is used up; a slot
    whose count has grown since is passed over.
    """

    def __init__(self, space: RowSpace) -> None:
        super().__init__(space)
        self.counts = np.zeros(space.rows, np.int32)
        self.row_of_slot = np.full(space.slots, -1, np.int64)
        self.candidates, self.candidate_counts = NOTHING.slots, NOTHING.slots
        self.next = self.used = 0
        self._before: tuple[int, int, Slots, RowIds, RowIds, Slots, Slots] | None = None

    def admit(self, hits: Slots, misses: RowIds, looked_up: RowIds) -> Placement:
        """Pair the most frequent misses with the least frequent residents."""
        lists = (self.candidates, self.candidate_counts)
        before = (self.next, self.used)
        np.add.at(self.counts, looked_up, 1)
        wanted = misses[np.argsort(-self.counts[misses], kind="stable")]
        fresh = np.arange(self.used, min(self.space.slots, self.used + len(wanted)), dtype=np.int32)
        self.used += len(fresh)
        self.row_of_slot[fresh] = wanted[: len(fresh)]
        rest = wanted[len(fresh) :]
        victims = self._rarest(len(rest), hits)
        better = self.counts[rest[: len(victims)]] > self.counts[self.row_of_slot[victims]]
        victims = victims[: int(better.argmin()) if not better.all() else len(better)]
        slots = np.concatenate((fresh, victims))
        old_rows = np.concatenate((np.full(len(fresh), -1), self.row_of_slot[victims]))
        self._before = (*before, slots, old_rows, looked_up, *lists)
        placed = wanted[: len(slots)]
        self.row_of_slot[slots] = placed
        return Placement(slots, placed)

    def _rarest(self, wanted: int, hits: Slots) -> Slots:
        """Up to ``wanted`` slots in the order of their counts, none of them looked up in this batch."""
        if wanted == 0 or self.used == 0:
            return NOTHING.slots
        if self.next + wanted > len(self.candidates):
            self._refresh(max(4 * wanted, self.used // 8))
        window = slice(self.next, self.next + wanted)
        slots = self.candidates[window]
        self.next += len(slots)
        current = self.counts[self.row_of_slot[slots]]
        # Slots hit in this batch have a higher count than when they were listed.
        usable: Slots = slots[(current == self.candidate_counts[window]) & ~np.isin(slots, hits)]
        return usable

    def _refresh(self, size: int) -> None:
        """List the ``size`` least used slots, least used first."""
        counts = self.counts[self.row_of_slot[: self.used]]
        size = min(size, self.used)
        least = np.argpartition(counts, size - 1)[:size]
        least = least[np.lexsort((least, counts[least]))]
        self.candidates, self.candidate_counts = least.astype(np.int32), counts[least]
        self.next = 0

    def undo(self) -> None:
        """Take the counts and the slots back."""
        if self._before is not None:
            self.next, self.used, slots, rows, looked_up, self.candidates, self.candidate_counts = (
                self._before
            )
            self.row_of_slot[slots] = rows
            np.subtract.at(self.counts, looked_up, 1)
            self._before = None

    def state_dict(self) -> dict[str, Any]:
        """Counts, residents and the list of victims."""
        return {
            "counts": self.counts,
            "row_of_slot": self.row_of_slot,
            "candidates": self.candidates,
            "candidate_counts": self.candidate_counts,
            "next": self.next,
            "used": self.used,
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """As in ``CachePolicy``."""
        super().check_state(state)
        within(state, "counts", 0, size=self.space.rows)
        residents(state, "row_of_slot", self.space.slots, self.space.rows)
        within(state, "used", 0, self.space.slots + 1)
        if (state["row_of_slot"][: state["used"]] < 0).any():
            raise Damaged("row_of_slot lacks rows of slots that are used")
        within(state, "candidates", 0, self.space.slots)
        within(state, "candidate_counts", 0, size=len(state["candidates"]))
        within(state, "next", 0, len(state["candidates"]) + 1)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from those counts."""
        self.counts, self.row_of_slot = state["counts"], state["row_of_slot"]
        self.candidates, self.candidate_counts = state["candidates"], state["candidate_counts"]
        self.next, self.used = int(state["next"]), int(state["used"])
        self._before = None


def distinct(slots: Slots, count: int) -> Slots:
    """The distinct values of ``slots`` (each in [0, count)), sorted."""
    seen = np.zeros(count, bool)
    seen[slots] = True
    return np.flatnonzero(seen).astype(np.int32)


def policy_bytes(policy: CachePolicy) -> int:
    """DRAM that a policy's own tables take."""
    return sum(v.nbytes for v in vars(policy).values() if isinstance(v, np.ndarray))


POLICIES: dict[str, type[CachePolicy]] = {"nocache": NoCache, "lru": Lru, "lfu": Lfu}
"""Names that ``tiers.policy`` takes beside ``resident`` (no cold tier)."""
