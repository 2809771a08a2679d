"""Makes a ``TierPlan`` of a batch's ids: which lookups go to which tier, and which rows must move first.

Works on row numbers of a table set with a handful of passes over the batch's lookups; nothing here touches
weights. Runs ahead of training, one batch early, in the loader's thread.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from recpipe.common.compiled import compiled, load_loops
from recpipe.common.spread import ALONE, Spread
from recpipe.data.checks import unknown_id
from recpipe.data.parts import in_order
from recpipe.data.select import places_of
from recpipe.plugin.api import Origin
from recpipe.plugin.policy import IN_STORE, CachePolicy, RowIds, Slots, asks_once
from recpipe.tables.tiers.checked import CheckedPolicy, Decision
from recpipe.tables.tiers.parting import IndexBags, Offsets, Parted, found_again, found_at, slots_in

Numbers = TypeVar("Numbers", bound=np.integer[Any])

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    from recpipe.tables.specs import TableSet
    from recpipe.tables.tiers.moves import Moves
    from recpipe.tables.tiers.on_gpu import GpuBags, GpuLookups
    from recpipe.tables.tiers.shared_rows import SharedLookups
    from recpipe.tables.tiers.transfer import Landed, Sent


@dataclass
class TierPlan:
    """The moves of one batch between tiers, and the tier of each of its lookups."""

    batch_size: int
    # rows that move before the batch is looked up
    slots: Slots
    """Resident slots that get a new row, int32 [P]."""
    placed: RowIds
    """The rows that those slots get, int64 [P]."""
    vacated: Slots
    """Slots that lose their row: ``slots``, then those that are emptied, int32 [E]."""
    evicted: RowIds
    """The rows that were in them, -1 for an empty slot, int64 [E]."""
    slab: RowIds
    """Rows of slab positions 0 .. S - 1, int64 [S]."""
    carried_from: NDArray[np.int64]
    """For each row in ``arrivals``, its position in ``departures``, or -1 if the store has it."""
    # lookups
    lookups: Parted | GpuLookups
    """Where each lookup's row is, once these have moved."""
    looked_up: int
    """Number of the whole batch's lookups."""
    hits: int
    """Those of them whose row was resident before any row moved for the batch."""
    cold_first: int = 0
    """The first sample, in the plan's order, that may need the slab."""
    shared: SharedLookups | None = None
    """This trainer's share of the lookups, if several train."""
    fetched: Future[Landed] | None = None
    """The fetch of ``fetch``'s rows, once it has been started."""
    moves: tuple[Moves, Sent] | None = None
    """Where its rows move, on the way to the device, if that was found out while the batch before trained."""
    begun: bool = False
    """Whether its batch's turn has come, so that it is not undone any more."""

    @property
    def needs_cold(self) -> NDArray[np.bool_]:
        """For each sample, in the batch's own order, whether it looks up a row in the slab, bool [B]."""
        return self.lookups.needs_cold

    @cached_property
    def arrivals(self) -> RowIds:
        """Rows that must be fetched or moved: first those for slots, then those for the slab."""
        return np.concatenate((self.placed, self.slab))

    @cached_property
    def fetch(self) -> RowIds:
        """The arrivals that the store must deliver."""
        return _not_carried(self.arrivals, self.carried_from)

    @property
    def fetches_residents(self) -> bool:
        """Whether lookups of resident rows must also wait for the store, since a row that gets a slot comes
        from there."""
        return bool((self.carried_from[: len(self.placed)] < 0).any())


@dataclass
class Bags:
    """A batch's lookups in all tables: bag i is ``rows[offsets[i] : offsets[i + 1]]``, feature-major."""

    rows: RowIds
    """Rows numbered over all tables, in the order of ``Context.tables``: int64 [L]."""
    offsets: Offsets
    """int64 [F * B + 1]."""
    batch_size: int

    def permuted(self, order: NDArray[np.int64]) -> Bags:
        """The bags of the samples in ``order`` (int64 [n]), in that order."""
        places, offsets = places_of(self.offsets, self.batch_size, order)
        return Bags(self.rows[places], offsets, len(order))


def table_bags(tables: TableSet, sparse: KeyedJaggedTensor, spread: Spread = ALONE) -> IndexBags:
    """The batch's lookups as rows of the set, with features in the tables' order, independent of that in
    ``sparse``."""
    sparse = in_order(sparse, tables.features)
    values = sparse.values().cpu().numpy()
    offsets = sparse.offsets().cpu().numpy().astype(np.int64, copy=False)
    size = sparse.stride()
    ends = offsets[np.arange(len(tables.features) + 1) * size]
    weights = sparse.weights().float().cpu().numpy() if tables.weighted else None
    return IndexBags(checked_rows(tables, values, ends, spread), offsets, size, weights)


def checked_rows(tables: TableSet, ids: RowIds, ends: Offsets, spread: Spread = ALONE) -> RowIds:
    """The rows of ``ids`` (int32 or int64 [L]), of which those of feature f are ``ends[f]`` up to
    ``ends[f + 1]``.

    Raises ``DataError`` if an id is not in its table.
    """
    bases, counts = tables.layout.bases[tables.table_of], np.diff(ends)
    sizes = np.diff(tables.layout.bases)[tables.table_of]
    rows = np.empty(len(ids), np.int64)

    def check(features: NDArray[np.int64]) -> None:
        used = features[counts[features] > 0]
        if not len(used):
            return
        # As an unsigned number, an id below 0 is above all others.
        unsigned = ids.view(f"u{ids.itemsize}")
        part = slice(ends[used[0]], ends[used[-1] + 1])
        most = np.maximum.reduceat(unsigned[part], ends[used] - part.start)
        for feature in used[most >= sizes[used].astype(np.uint64)]:
            own = slice(ends[feature], ends[feature + 1])
            at = int(np.argmax(unsigned[own] >= sizes[feature]))
            raise unknown_id(ids[own][at], tables.features[feature], sizes[feature])
        np.add(ids[part], np.repeat(bases[used], counts[used]), out=rows[part])

    threads = min(len(spread.parts(len(ids))), len(counts))
    spread.map(check, np.array_split(np.arange(len(counts)), threads))
    return rows


class TierPlanner:
    """Keeps the map from rows to tiers as it will be once every planned batch has been carried out.

    A policy is asked once for each batch. If a plan is undone, the policy's decisions are kept for when the
    same batch is planned again, also in a run resumed from a checkpoint.
    """

    def __init__(
        self,
        policy: CachePolicy,
        carry: bool,
        pooled: bool = True,
        owner: Origin | None = None,
    ) -> None:
        load_loops()
        self.policy = policy
        self.space = policy.space
        self.pooled = pooled
        """Whether rows are summed by bag."""
        self.carry = carry
        """Whether slab rows that the next batch needs again stay in the slab instead of passing through the
        store."""
        self.asked = policy if owner is None else CheckedPolicy(policy, owner)
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
        residents, before = self.space.residents, self.slab_rows
        rows, times = self._told(bags)
        moved = self.asked.migrate(rows) if known is None else known.moved
        moved_from = self.where[moved.rows]
        where, missing = found_at(self.where, bags.indices)
        # What a policy moves in for this batch was not resident.
        found = len(bags) - bags.count(missing)
        emptied = residents.empty(moved.freed)
        dropped = residents.put(moved.slots, moved.rows)
        evicts = bool(len(emptied)) or bool((dropped >= 0).any())
        if evicts:
            where, missing = found_at(self.where, bags.indices)
        elif len(moved.slots):  # only rows that were missing have come
            missing = found_again(self.where, bags.indices, where, missing)
        misses = bags.indices[missing]
        if bags.times is None:
            misses = _distinct(self.where, misses)
        hits = slots_in(where) if len(missing) else where
        if known is None:
            admitted = self.asked.admit(_repeated(hits, where, times), misses, rows)
        else:
            admitted = known.admitted
        placed_from = _joined(moved_from, self.where[admitted.rows])
        emptied = _joined(emptied, residents.empty(admitted.freed))
        evicted = _joined(dropped, residents.put(admitted.slots, admitted.rows), emptied)
        # Copies: a policy may go on to use its arrays.
        slots = np.concatenate((moved.slots, admitted.slots))
        placed = np.concatenate((moved.rows, admitted.rows))
        vacated = _joined(slots, moved.freed, admitted.freed)
        slab, carried_from = _to_slab(self.where, misses, placed_from, self.carry)
        if evicts:
            self._return(evicted, len(before), np.concatenate((placed, slab)), carried_from)
        _note_slab(self.where, before, slab)
        self.slab_rows = slab
        found_again(self.where, bags.indices, where, missing)
        lookups = bags.parted(where, self.pooled)
        moves = (slots, placed, vacated, evicted, slab, carried_from)
        plan = TierPlan(bags.batch_size, *moves, lookups, len(bags), found)
        self._pending = (plan, before, bags, known or Decision(moved, admitted, bags.indices))
        return plan

    def commit(self) -> None:
        """Note that the last plan is being carried out, so that it cannot be undone any more."""
        self._pending = None

    def _return(self, evicted: RowIds, first: int, arrivals: RowIds, sources: NDArray[np.int64]) -> None:
        """Note in ``sources`` where ``arrivals`` are that have just lost their slots and are needed after
        all: at ``first`` plus their position in ``evicted``."""
        known = np.flatnonzero(evicted >= 0)
        leaving = evicted[known]
        leaving_where, arriving_where = self.where[leaving], self.where[arrivals]
        self.where[arrivals] = IN_STORE
        self.where[leaving] = -2 - known.astype(np.int32)
        found = self.where[arrivals]
        # A row may leave its slot and come back into the slab, so the entries of arrivals are restored last.
        self.where[leaving] = leaving_where
        self.where[arrivals] = arriving_where
        back = found < IN_STORE
        sources[back] = first - 2 - found[back]

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


def reorder(plan: TierPlan, order: NDArray[np.int64], cold_first: int) -> TierPlan:
    """``plan`` with the samples in ``order``; the slab's bags cover only samples from ``cold_first`` on."""
    plan.batch_size, plan.cold_first = len(order), cold_first
    plan.lookups = plan.lookups.permuted(order, cold_first)
    return plan


def _joined(*parts: NDArray[Numbers]) -> NDArray[Numbers]:
    """``parts`` after one another; the one itself if the others are empty, as most are."""
    used = [part for part in parts if len(part)]
    return used[0] if len(used) == 1 else np.concatenate(parts)


@compiled
def _distinct(where: Slots, rows: RowIds) -> RowIds:
    """Distinct ``rows``, none of which is in a slot, in the order of their last occurrences; O(n), by marking
    the map ``where`` for the time being."""
    before = np.empty(len(rows), np.int32)
    distinct = np.empty(len(rows), np.int64)
    first = len(rows)
    for i in range(len(rows) - 1, -1, -1):
        if where[rows[i]] < 0:
            first -= 1
            distinct[first], before[first] = rows[i], where[rows[i]]
            where[rows[i]] = 0
    for i in range(first, len(rows)):
        where[distinct[i]] = before[i]
    return distinct[first:]


@compiled
def _to_slab(where: Slots, misses: RowIds, placed_from: Slots, carry: bool) -> tuple[RowIds, RowIds]:
    """Those ``misses`` that are in no slot by now, and ``TierPlan.carried_from`` for rows that are in the
    slab.

    ``placed_from``: what the map said of each row that got a slot before it did (int32 [P]). Without
    ``carry``, rows do not pass from slab to slab but through the store.
    """
    slab = np.empty(len(misses), np.int64)
    carried_from = np.full(len(placed_from) + len(misses), -1)
    for i in range(len(placed_from)):
        if placed_from[i] < IN_STORE:
            carried_from[i] = -2 - placed_from[i]
    count = 0
    for row in misses:
        if where[row] < 0:
            slab[count] = row
            if carry and where[row] < IN_STORE:
                carried_from[len(placed_from) + count] = -2 - where[row]
            count += 1
    return slab[:count], carried_from[: len(placed_from) + count]


@compiled
def _note_slab(where: Slots, before: RowIds, slab: RowIds) -> None:
    """Note in the map that the slab has the rows ``slab`` instead of ``before``."""
    for row in before:
        if where[row] < 0:
            where[row] = IN_STORE
    for i in range(len(slab)):
        where[slab[i]] = -2 - i


@compiled
def _not_carried(arrivals: RowIds, carried_from: RowIds) -> RowIds:
    fetched = np.empty(len(arrivals), np.int64)
    count = 0
    for i in range(len(arrivals)):
        fetched[count] = arrivals[i]
        count += carried_from[i] < 0
    return fetched[:count]
