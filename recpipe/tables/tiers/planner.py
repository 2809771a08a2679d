"""Makes a ``TierPlan`` of a batch's ids: which lookups go to which tier, and which rows must move first.

Works on row numbers of a table set with a handful of passes over the batch's lookups; nothing here touches
weights. Runs ahead of training, one batch early, in the loader's thread.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from recpipe.common.loops import load_loops
from recpipe.common.saved import entries, residents
from recpipe.plugin.bags import Bags, RowIds
from recpipe.plugin.calls import Owned
from recpipe.plugin.policy import IN_STORE, NOTHING, Cache, CachePolicy, Placement, asks_once
from recpipe.tables.tiers import row_map
from recpipe.tables.tiers.decided import Decision, PlacementCheck, check_decision
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
        """For each row its slot, ``IN_STORE``, or its place in the slab: int32 [rows]."""
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
        # What a policy moves in for this batch was not resident.
        missed, found, missing, misses, hits, left, moved_from = row_map.migrate(
            *(self.where, self.row_of_slot, rows, NOTHING.slots if times is None else times),
            *(moved.slots, moved.rows, moved.freed),
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
        evicted, slab, carried_from, fetch = row_map.admit(
            *(self.where, self.row_of_slot, rows, found, missing, misses, slots, placed),
            *(freed, len(moved.slots), left, moved_from, before, self.carry),
        )
        self.slab_rows = slab
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
        self.where[plan.slab] = IN_STORE
        self.where[plan.placed] = IN_STORE
        self.row_of_slot[plan.vacated] = plan.evicted
        left = plan.evicted >= 0
        self.where[plan.evicted[left]] = plan.vacated[left]
        self.where[before] = -2 - np.arange(len(before), dtype=np.int32)
        self.slab_rows = before
        self._pending = None
        return bags

    def restore(self, row_of_slot: RowIds) -> None:
        """Start from these resident rows (int64 [slots], -1 for an empty slot) and an empty slab."""
        assert self._pending is None
        assert len(row_of_slot) == self.space.slots
        used = np.flatnonzero(row_of_slot >= 0).astype(np.int32)
        rows = row_of_slot[used]
        self.where.fill(IN_STORE)
        self.row_of_slot.fill(-1)
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
