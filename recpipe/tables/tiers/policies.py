"""The built-in cache policies: none, a fixed hot set, and with ``lru`` the strong baselines LRU and LFU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recpipe.common.loops import ALONE, Spread, compiled
from recpipe.common.saved import Damaged, within
from recpipe.plugin.bags import RowIds, Slots
from recpipe.plugin.policy import NOTHING, CachePolicy, Placement, RowSpace
from recpipe.tables.tiers.lru import Lru


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
        """Raises ``Damaged`` if ``state`` cannot be a result of ``state_dict()``; called before anything is
        loaded."""
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
            self._moves = self._missing()
            self._settled = not len(self._moves.rows)
        moves, chunk = self._moves, self.chunk
        self._moves = Placement(moves.slots[chunk:], moves.rows[chunk:])
        return Placement(moves.slots[:chunk], moves.rows[:chunk])

    def _missing(self) -> Placement:
        """The target's rows that are not resident, and slots for them: first empty ones, then those of other
        rows."""
        held = self.space.residents.row_of_slot
        incoming = self.target[self.space.residents.slot_of(self.target) < 0]
        leaving = np.flatnonzero((held >= 0) & ~np.isin(held, self.target))
        slots = np.concatenate((np.flatnonzero(held < 0), leaving))[: len(incoming)]
        return Placement(slots.astype(np.int32), incoming)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with that set."""
        self.retarget(state["target"])


class Lfu(CachePolicy):
    """Least frequently used, with counts kept for all rows: a missed row replaces a resident one only
    when it has been looked up more often (the rule of FBGEMM's LFU cache).

    Victims come from a list of the least used slots, which is rebuilt when it is used up. Slots whose count
    has grown since are skipped.
    """

    each_once = True

    def __init__(self, space: RowSpace) -> None:
        super().__init__(space)
        self.counts = np.zeros(space.rows, np.int32)
        self.candidates, self.candidate_counts = NOTHING.slots, NOTHING.slots
        self.next = self.used = 0

    def admit(self, hits: Slots, misses: RowIds, looked_up: RowIds) -> Placement:
        """Pair the most frequent misses with the least frequent residents."""
        add_lookups(self.counts, looked_up, self.times)
        wanted = misses[np.argsort(-self.counts[misses], kind="stable")]
        fresh = np.arange(self.used, min(self.space.slots, self.used + len(wanted)), dtype=np.int32)
        rest = wanted[len(fresh) :]
        victims = self._rarest(len(rest), hits)
        self.used += len(fresh)
        better = self.counts[rest[: len(victims)]] > self.counts[self.space.residents.row_of_slot[victims]]
        victims = victims[: int(better.argmin()) if not better.all() else len(better)]
        slots = np.concatenate((fresh, victims))
        return Placement(slots, wanted[: len(slots)])

    def _rarest(self, wanted: int, hits: Slots) -> Slots:
        """Up to ``wanted`` slots in the order of their counts, none of them looked up in this batch."""
        if wanted == 0 or self.used == 0:
            return NOTHING.slots
        if self.next + wanted > len(self.candidates):
            self._refresh(max(4 * wanted, self.used // 8))
        window = slice(self.next, self.next + wanted)
        slots = self.candidates[window]
        self.next += len(slots)
        current = self.counts[self.space.residents.row_of_slot[slots]]
        # Slots hit in this batch have a higher count than when they were listed.
        usable: Slots = slots[(current == self.candidate_counts[window]) & ~np.isin(slots, hits)]
        return usable

    def _refresh(self, size: int) -> None:
        """List the ``size`` least used slots, least used first."""
        counts = self.counts[self.space.residents.row_of_slot[: self.used]]
        size = min(size, self.used)
        least = np.argpartition(counts, size - 1)[:size]
        least = least[np.lexsort((least, counts[least]))]
        self.candidates, self.candidate_counts = least.astype(np.int32), counts[least]
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        """Counts and the list of victims."""
        return {
            "counts": self.counts,
            "candidates": self.candidates,
            "candidate_counts": self.candidate_counts,
            "next": self.next,
            "used": self.used,
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises ``Damaged`` if ``state`` cannot be a result of ``state_dict()``; called before anything is
        loaded."""
        super().check_state(state)
        within(state, "counts", 0, size=self.space.rows)
        within(state, "used", 0, self.space.slots + 1)
        within(state, "candidates", 0, self.space.slots)
        within(state, "candidate_counts", 0, size=len(state["candidates"]))
        within(state, "next", 0, len(state["candidates"]) + 1)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from those counts."""
        self.counts = state["counts"]
        self.candidates, self.candidate_counts = state["candidates"], state["candidate_counts"]
        self.next, self.used = int(state["next"]), int(state["used"])


def add_lookups(counts: NDArray[np.int32], rows: RowIds, times: NDArray[np.int32] | None) -> None:
    """Count in ``counts`` (by row) how often a batch looks up ``rows``, as ``CachePolicy.times`` says."""
    if times is None:
        _count(counts, rows)
    else:
        _count_times(counts, rows, times)


@compiled
def _count(counts: NDArray[np.int32], rows: RowIds) -> None:
    for row in rows:
        if not 0 <= row < len(counts):
            raise IndexError("a row that is in no table")
        counts[row] += 1


@compiled
def _count_times(counts: NDArray[np.int32], rows: RowIds, times: NDArray[np.int32]) -> None:
    for i in range(len(rows)):
        if not 0 <= rows[i] < len(counts):
            raise IndexError("a row that is in no table")
        counts[rows[i]] += times[i]


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


def policy_bytes(policy: CachePolicy) -> int:
    """Bytes of host memory of a policy: its own arrays, and what it says to take beside them."""
    arrays = sum(v.nbytes for v in vars(policy).values() if isinstance(v, np.ndarray))
    return arrays + policy.waiting_bytes


POLICIES: dict[str, type[CachePolicy]] = {"nocache": NoCache, "lru": Lru, "lfu": Lfu}
"""The values of ``tiers.policy`` besides ``resident`` (no cold tier)."""
BYTES_BESIDE = {"nocache": (0, 0), "lru": (0, 20), "lfu": (4, 0)}
"""Host bytes of each of them for a row, and for a row that can be resident."""
