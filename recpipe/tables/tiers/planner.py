"""Makes a ``TierPlan`` of a batch's ids: which lookups go to which tier, and which rows must move first.

Works on row numbers of a table set with a handful of passes over the batch's lookups; nothing here touches
weights. Runs ahead of training, one batch early, in the loader's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from recpipe.common.loops import load_loops
from recpipe.plugin.bags import IndexBags, RowIds, Slots
from recpipe.plugin.calls import Owned
from recpipe.plugin.policy import IN_STORE, Cache, CachePolicy, Placement, asks_once
from recpipe.tables.tiers import row_map
from recpipe.tables.tiers.decided import Decision, PlacementCheck
from recpipe.tables.tiers.plan import TierPlan

Numbers = TypeVar("Numbers", bound=np.integer[Any])

ONCE: Slots = np.empty(0, np.int32)
"""In place of how often each row is looked up, where it is there itself as often."""

if TYPE_CHECKING:
    from recpipe.tables.tiers.gpu_lookups import GpuBags


class TierPlanner:
    """Keeps the map from rows to tiers as it will be once every planned batch has been carried out.

    A policy is asked once for each batch. If a plan is undone, the policy's decisions are kept for when the
    same batch is planned again, also in a run resumed from a checkpoint.
    """

    def __init__(
        self,
        policy: CachePolicy,
        carry: bool,
        owner: Owned[Cache] | None = None,
    ) -> None:
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
        self._pending: tuple[TierPlan, RowIds, IndexBags | GpuBags, Decision] | None = None

    def plan(self, bags: IndexBags | GpuBags) -> TierPlan:
        """Decide for one batch; ``commit`` must follow before the next ``plan``."""
        assert self._pending is None, "the last plan has not been carried out"
        known, self.decided = self.decided, None
        if known is not None and not known.is_of(bags.indices):
            known = None
        before, rows = self.slab_rows, bags.indices
        told, times = self._told(bags)
        moved = known.moved if known is not None else _typed(self._ask(CachePolicy.migrate, told))
        each = ONCE if bags.times is None else bags.times
        # What a policy moves in for this batch was not resident.
        missed, found, missing, misses, hits, left, moved_from = row_map.migrate(
            self.where, self.row_of_slot, rows, each, moved.slots, moved.rows, moved.freed
        )
        if known is not None:
            admitted = known.admitted
        else:
            hits = _repeated(hits, found, times)
            admitted = _typed(self._ask(CachePolicy.admit, hits, misses, told))
        # Copies: a policy may go on to use its arrays.
        slots = np.concatenate((moved.slots, admitted.slots))
        placed = np.concatenate((moved.rows, admitted.rows))
        freed = _joined(moved.freed, admitted.freed)
        evicted, slab, carried_from, fetch = row_map.admit(
            self.where,
            self.row_of_slot,
            rows,
            found,
            missing,
            misses,
            slots,
            placed,
            freed,
            len(moved.slots),
            left,
            moved_from,
            before,
            self.carry,
        )
        self.slab_rows = slab
        plan = TierPlan(
            *(slots, placed, _joined(slots, freed), evicted, slab, carried_from, fetch),
            found,
            len(bags),
            len(bags) - missed,
        )
        self._pending = (plan, before, bags, known or Decision(moved, admitted, rows))
        return plan

    def _ask(self, method: Callable[..., Placement], *told: Any) -> Placement:
        """What the policy decides."""
        if self._owned is None:
            placement: Placement = getattr(self.policy, method.__name__)(*told)
        else:
            owned, check = self._owned
            placement = owned.call(method, *told, wrong=partial(check.wrong, method, told))
        return placement

    def commit(self) -> None:
        """Note that the last plan is being carried out, so that it cannot be undone any more."""
        self._pending = None

    def _told(self, bags: IndexBags | GpuBags) -> tuple[RowIds, NDArray[np.int32] | None]:
        """The rows that the policy is told, and how often it is told each of ``bags.indices``; None: once."""
        self.policy.times = None
        if bags.times is None:
            return bags.indices, None
        if asks_once(type(self.policy)):
            self.policy.times = bags.times
            return bags.indices, None
        return np.repeat(bags.indices, bags.times), bags.times

    def undo(self) -> IndexBags | GpuBags | None:
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

    @property
    def overhead_bytes(self) -> int:
        """DRAM of the maps: 4 bytes per row of all tables and 8 per slot."""
        return self.space.residents.nbytes


def _repeated(hits: Slots, where: Slots, times: NDArray[np.int32] | None) -> Slots:
    """``hits``, those of ``where`` that are slots, each as often as ``times`` says."""
    return hits if times is None else np.repeat(hits, times[where >= 0])


def _joined(*parts: NDArray[Numbers]) -> NDArray[Numbers]:
    """``parts`` after one another; the one itself if the others are empty, as most are."""
    used = [part for part in parts if len(part)]
    return used[0] if len(used) == 1 else np.concatenate(parts)


def _typed(placement: Placement) -> Placement:
    """``placement`` with arrays of the types that ``Placement`` says; a policy's own may be of others."""
    slots, rows, freed = placement.slots, placement.rows, placement.freed
    if slots.dtype == freed.dtype == np.int32 and rows.dtype == np.int64:
        return placement
    return Placement(slots.astype(np.int32), rows.astype(np.int64), freed.astype(np.int32))
