"""Makes a ``TierPlan`` of a batch's ids: which lookups go to which tier, and which rows must move first.

Works on row numbers of a table set with a handful of passes over the batch's lookups; nothing here touches
weights. Runs ahead of training, one batch early, in the loader's thread. A policy's decisions are kept for a
plan that is undone (``Decision``), and those of a plugin's policy are checked (``PlacementCheck``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from recpipe.common.loops import compiled, load_loops
from recpipe.common.saved import Damaged, entries, residents, within
from recpipe.plugin.bags import Bags, RowIds, Slots
from recpipe.plugin.calls import Owned
from recpipe.plugin.policy import NOTHING, Cache, CachePolicy, Placement, asks_once
from recpipe.plugin.residents import IN_STORE
from recpipe.tables.tiers import row_map
from recpipe.tables.tiers.plan import TierPlan

if TYPE_CHECKING:
    from recpipe.tables.tiers.gpu_lookups import GpuBags

_STATE = {
    "policy": str,
    "slots": int,
    "row_of_slot": NDArray[np.int64],
    "state": dict[str, Any],
}
"""What a checkpoint has of a group's placement, and the types."""
RANKS = "ranks"
"""What it has instead where the group is sharded: each rank's tiers."""


def of_whole(state: Mapping[str, Any]) -> bool:
    """Whether ``state`` is of a group that was not sharded."""
    return RANKS not in state and _STATE.keys() <= state.keys()


class TierPlanner:
    """Keeps the map from rows to tiers as it will be once every planned batch has been carried out.

    A policy is asked once for each batch. If a plan is undone, the policy's decisions are kept for when the
    same batch is planned again, also in a run resumed from a checkpoint.
    """

    def __init__(self, policy: CachePolicy, carry: bool, owner: Owned[Cache] | None = None) -> None:
        load_loops()
        self.policy = policy
        self.space = policy.space
        self.carry = carry
        """Whether slab rows that the next batch needs again stay in the slab instead of passing through the
        store."""
        self._owned: tuple[Owned[CachePolicy], PlacementCheck] | None = None
        """The policy if it is a plugin's, and what checks its decisions; core's own are trusted."""
        if owner is not None:
            owned: Owned[CachePolicy] = Owned(owner.label, owner.origin, policy, made_by="policy")
            self._owned = owned, PlacementCheck(policy)
        self.where = self.space.residents._where
        """Where each row is, as ``recpipe.plugin.residents`` says: int32 [rows]."""
        self.row_of_slot = self.space.residents._row_of_slot
        self.slab_rows: RowIds = np.empty(0, np.int64)
        self.decided: Decision | None = None
        """The decision for a batch whose plan was undone."""
        self._pending: tuple[TierPlan, RowIds, Bags | GpuBags, Decision] | None = None

    def plan(self, bags: Bags | GpuBags) -> TierPlan:
        """Decide for one batch; ``commit`` must follow before the next ``plan``."""
        assert self._pending is None, "the last plan has not been carried out"
        known, self.decided = self.decided, None
        if known is not None and not known.is_of(bags.rows):
            known = None
        before, rows, times = self.slab_rows, bags.rows, bags.times
        # The policy is told each row once, with how often, if it knows what to do with that.
        once = times is not None and asks_once(type(self.policy))
        self.policy.times = times if once else None
        repeats = None if once else times
        told = rows if repeats is None else np.repeat(rows, repeats)
        moved = known.moved if known is not None else self._ask(CachePolicy.migrate, told)
        of_slot, of_slab, noted = self.space.residents.noted
        # What a policy moves in for this batch was not resident.
        missed, found, missing, misses, hits, left, moved_from = row_map.migrate(
            *(self.where, self.row_of_slot, of_slot, of_slab, noted, rows),
            *(NOTHING.slots if times is None else times, moved.slots, moved.rows, moved.freed),
        )
        if known is not None:
            admitted = known.admitted
        else:
            hits = hits if repeats is None else np.repeat(hits, repeats[found >= 0])
            admitted = self._ask(CachePolicy.admit, hits, misses, told)
        # Copies: a policy may go on to use its arrays.
        slots = np.concatenate((moved.slots, admitted.slots))
        placed = np.concatenate((moved.rows, admitted.rows))
        freed = np.concatenate((moved.freed, admitted.freed))
        evicted, slab, carried_from, fetch, in_slab = row_map.admit(
            *(self.where, self.row_of_slot, of_slot, of_slab, noted, rows, found, missing, misses),
            *(slots, placed, freed, len(moved.slots), left, moved_from, before, self.carry),
        )
        self.slab_rows, notes = slab, self.space.residents.notes
        if notes is not None:
            notes.of_slab = in_slab
        vacated = np.concatenate((slots, freed)) if len(freed) else slots
        moves = slots, placed, vacated, evicted, slab, carried_from, fetch
        plan = TierPlan(*moves, found, len(bags), len(bags) - missed)
        self._pending = (plan, before, bags, known or Decision(moved, admitted, rows))
        return plan

    def _ask(self, method: Callable[..., Placement], *told: Any) -> Placement:
        """What the policy decides, with arrays of the types that ``Placement`` says."""
        if self._owned is None:
            placement: Placement = getattr(self.policy, method.__name__)(*told)
        else:
            owned, check = self._owned
            placement = owned.call(method, *told, wrong=partial(check.wrong, method, told))
        slots, rows, freed = placement.slots, placement.rows, placement.freed
        if slots.dtype == freed.dtype == np.int32 and rows.dtype == np.int64:
            return placement
        return Placement(slots.astype(np.int32), rows.astype(np.int64), freed.astype(np.int32))

    def commit(self) -> None:
        """Note that the last plan is being carried out, so that it cannot be undone any more."""
        self._pending = None

    def undo(self) -> Bags | GpuBags | None:
        """Undo a plan that has not been carried out, so that the map shows where rows really are.

        Returns the bags to plan again later, with the same plan as the result, or None if nothing was
        planned. The policy is not told: it has seen the batch, and its decisions are kept for it.
        """
        if self._pending is None:
            return None
        plan, before, bags, self.decided = self._pending
        left, notes = plan.evicted >= 0, self.space.residents.notes
        changed = np.concatenate((plan.slab, plan.placed, plan.evicted[left], before))
        kept = None if notes is None else notes[changed]
        self.where[plan.slab] = IN_STORE
        self.where[plan.placed] = IN_STORE
        self.row_of_slot[plan.vacated] = plan.evicted
        self.where[plan.evicted[left]] = plan.vacated[left]
        self.where[before] = -2 - np.arange(len(before), dtype=np.int32)
        self.slab_rows = before
        if notes is not None and kept is not None:
            notes.of_slab = np.zeros(len(before), np.int32)
            notes[changed] = kept
        self._pending = None
        return bags

    def restore(self, row_of_slot: RowIds) -> None:
        """Start from these resident rows (int64 [slots], -1 for an empty slot), an empty slab and no
        notes."""
        assert self._pending is None
        assert len(row_of_slot) == self.space.slots
        used = np.flatnonzero(row_of_slot >= 0).astype(np.int32)
        rows = row_of_slot[used]
        self.where.fill(IN_STORE)
        self.row_of_slot.fill(-1)
        if self.space.residents.notes is not None:
            self.space.residents.notes.clear()
        self.space.residents.put(used, rows)
        self.slab_rows = np.empty(0, np.int64)

    # -- a checkpoint, from which a resumed run makes the same decisions ------------------------

    def state(self) -> dict[str, Any]:
        """The resident rows, the policy's state, and its decision for the next batch."""
        return {
            "policy": type(self.policy).__name__,
            "slots": self.space.slots,
            "row_of_slot": self.row_of_slot.copy(),
            "state": copy.deepcopy(self.policy.state_dict()),
            "decided": None if self.decided is None else self.decided.to_state(),
        }

    def has_made(self, state: Mapping[str, Any]) -> bool:
        """Whether ``state`` is of this policy and budget, of a whole group, and not of a recpipe before
        0.2."""
        mine = {"policy": type(self.policy).__name__, "slots": self.space.slots}
        return "decided" in state and all(state.get(key) == value for key, value in mine.items())

    def check_state(self, state: Mapping[str, Any]) -> None:
        """``Damaged`` on what ``state()`` cannot have given; that of shards is not looked at."""
        if RANKS in state:
            return
        entries(_STATE, state)
        if self.has_made(state):
            residents(state, "row_of_slot", self.space.slots, self.space.rows)
            self.policy.check_state(state["state"])
            if state["decided"] is not None:
                decided = entries({"decided": dict[str, Any]}, state)["decided"]
                check_decision(decided, state["row_of_slot"], self.space.rows)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue with the saved resident rows in their slots and the saved state of the policy."""
        self.restore(state["row_of_slot"])
        self.policy.load_state_dict(state["state"])
        if state["decided"] is not None:
            self.decided = Decision.from_state(state["decided"])


@dataclass(frozen=True)
class Decision:
    """A policy's decision for one batch, which looks up ``rows`` (int64 [L], with repeats, or distinct and
    sorted)."""

    moved: Placement
    admitted: Placement
    rows: RowIds

    def is_of(self, rows: RowIds) -> bool:
        """Whether the decision is for the batch that looks up ``rows``, each once or with repeats."""
        if self.rows is rows or np.array_equal(self.rows, rows):
            return True
        # One of the two may be of a GPU, if a run goes on from a checkpoint on another device.
        return len(self.rows) != len(rows) and np.array_equal(np.unique(self.rows), np.unique(rows))

    def to_state(self) -> dict[str, Any]:
        """The decision as arrays, for a checkpoint."""
        parts = {"moved": self.moved, "admitted": self.admitted}
        fields = {f"{name}_{field}": getattr(p, field) for name, p in parts.items() for field in _FIELDS}
        return {"rows": self.rows, **fields}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Decision:
        """Make a decision from ``to_state``'s result."""
        moved, admitted = (
            Placement(*(state[f"{name}_{field}"] for field in _FIELDS)) for name in ("moved", "admitted")
        )
        return cls(moved, admitted, state["rows"])


_FIELDS = ("slots", "rows", "freed")


_HINTS: dict[str, Any] = {
    "slots": NDArray[np.int32],
    "rows": NDArray[np.int64],
    "freed": NDArray[np.int32],
}


def check_decision(state: Mapping[str, Any], row_of_slot: RowIds, rows: int) -> None:
    """``Damaged`` if ``state`` cannot be a result of ``Decision.to_state`` while the rows of ``row_of_slot``
    are resident."""
    hints = {f"{name}_{field}": _HINTS[field] for name in ("moved", "admitted") for field in _FIELDS}
    found = entries({"rows": NDArray[np.int64], **hints}, state, "decided")
    for key, values in found.items():
        size = len(found[key.replace("_rows", "_slots")]) if key.endswith("_rows") else None
        within(found, key, 0, rows if key.endswith("rows") else len(row_of_slot), size=size)
        if key != "rows" and len(np.unique(values)) < len(values):
            raise Damaged(f"decided.{key} has a number twice")
    held = row_of_slot.copy()
    for name in ("moved", "admitted"):
        slots, placed, freed = (found[f"{name}_{field}"] for field in _FIELDS)
        vacated = np.concatenate((slots, freed))
        looked_up = np.isin(held[vacated], found["rows"]).any() or not np.isin(placed, found["rows"]).all()
        if np.isin(placed, held).any() or (name == "admitted" and looked_up):
            raise Damaged(f"decided.{name}_rows cannot get these slots")
        held[freed], held[slots] = -1, placed


MARK = np.iinfo(np.int32).min
"""The mark of a row that is in no tier."""


class PlacementCheck:
    """Says what is wrong with the placements of a plugin's ``policy``, for ``Owned.call``.

    One pass over the rows that move and the slots that are looked up checks all, with marks in maps that
    exist anyway.
    """

    def __init__(self, policy: CachePolicy) -> None:
        self._kind = type(policy).__name__
        self._where = policy.space.residents._where
        self._marks = np.zeros(policy.space.slots, np.bool_)
        self._moved = NOTHING.slots
        """The slots of ``migrate``'s rows."""

    def wrong(self, method: Callable[..., Placement], told: Sequence[Any], made: object) -> str | None:
        """What is wrong with what ``method`` returned when it was ``told`` so; None: nothing."""
        admits = method is CachePolicy.admit
        hits, misses = told[:2] if admits else (NOTHING.slots, NOTHING.rows)
        said = None
        if not isinstance(made, Placement):
            said = f"a {type(made).__name__}; a Placement is asked for"
        elif made is not NOTHING:
            said = self._misplaced(made, hits, misses, admits)
        if said is not None:
            return f": {self._kind}.{method.__name__}() placed {said}"
        if isinstance(made, Placement) and not admits:
            self._moved = made.slots
        return None

    def _misplaced(self, placement: Placement, hits: Slots, misses: RowIds, admits: bool) -> str | None:
        slots, rows, freed = placement.slots, placement.rows, placement.freed
        if len(slots) != len(rows):
            return f"{len(rows)} rows in {len(slots)} slots"
        for numbers, what in ((slots, "slot"), (freed, "slot"), (rows, "row")):
            if not isinstance(numbers, np.ndarray) or numbers.ndim != 1:
                return f"{what}s that are no array of one dimension"
            if not np.issubdtype(numbers.dtype, np.integer):
                return f"{what}s of type {numbers.dtype}"
        if not len(slots) + len(freed):
            return None
        wrong, number = _fault(
            self._marks, self._where, slots, freed, rows, self._moved, hits, misses, admits
        )
        most = len(self._where) if wrong == NO_ROW else len(self._marks)
        return FAULTS[wrong].format(number=number, most=most) if wrong else None


NO_SLOT, NO_ROW, SLOT_TWICE, ROW_TWICE, MOVED, LOOKED_UP, NOT_MISSED, RESIDENT = range(1, 9)


FAULTS = {
    NO_SLOT: "slot {number}, and there are {most}",
    NO_ROW: "row {number}, and there are {most}",
    SLOT_TWICE: "something in a slot twice",
    ROW_TWICE: "a row twice",
    MOVED: "something in a slot that migrate() has just given to another row",
    LOOKED_UP: "something in the slot of a row that this batch looks up",
    NOT_MISSED: "a row that is not among the misses",
    RESIDENT: "a row that is resident already",
}


@compiled
def _fault(
    marks: NDArray[np.bool_],
    where: NDArray[np.int32],
    slots: Slots,
    freed: Slots,
    rows: RowIds,
    moved: Slots,
    hits: Slots,
    misses: RowIds,
    admits: bool,
) -> tuple[int, int]:
    """What is wrong with a placement, a key of ``FAULTS``, and the number of it; 0: nothing.

    ``marks`` (False for each slot) and ``where`` are as they were before when it returns. ``admits``: it is
    ``admit``'s; else ``migrate``'s.
    """
    # Misses are distinct rows that exist, in no slot, and most policies place the first of them.
    first_misses = admits and len(rows) <= len(misses)
    if first_misses:
        for i in range(len(rows)):
            first_misses = first_misses and rows[i] == misses[i]
    for slot in slots:
        if slot < 0 or slot >= len(marks):
            return NO_SLOT, slot
    for slot in freed:
        if slot < 0 or slot >= len(marks):
            return NO_SLOT, slot
    for row in rows:
        if row < 0 or row >= len(where):
            return NO_ROW, row

    wrong = marked = 0
    for i in range(len(slots) + len(freed)):
        slot = slots[i] if i < len(slots) else freed[i - len(slots)]
        if marks[slot]:
            wrong = SLOT_TWICE
            break
        marks[slot] = True
        marked += 1
    if admits and not wrong:
        for slot in moved:
            if marks[slot]:
                wrong = MOVED
    if admits and not wrong:
        for slot in hits:
            if marks[slot]:
                wrong = LOOKED_UP
    for i in range(marked):
        marks[slots[i] if i < len(slots) else freed[i - len(slots)]] = False
    if wrong or first_misses:
        return wrong, 0

    before = np.empty(len(rows), np.int32)
    marked = found = 0
    for i in range(len(rows)):
        if where[rows[i]] == MARK:
            wrong = ROW_TWICE
            break
        before[i] = where[rows[i]]
        found += before[i] >= 0
        where[rows[i]] = MARK
        marked += 1
    if not admits and not wrong and found:
        wrong = RESIDENT
    if admits and not wrong:
        found = 0
        for miss in misses:  # they are distinct
            found += where[miss] == MARK
        if found < len(rows):
            wrong = NOT_MISSED
    for i in range(marked):
        where[rows[i]] = before[i]
    return wrong, 0
