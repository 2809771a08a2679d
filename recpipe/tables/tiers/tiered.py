"""``TieredEmbeddingBagCollection``: tables larger than device memory, exact under every cache policy.

A row is in one of three places: a **resident** slot (a TBE of ``slots`` rows), the **slab** (a second TBE for
rows that one batch alone needs) or the **cold store**. It moves with its optimizer state, so each update is
the one that a single big table would have made.

A batch passes through four calls, in this order (``forward`` makes all of them):

    plan    ids -> TierPlan                              loader thread, while the last batch trains
    fetch   store -> host buffer                         I/O thread, started by ``prefetch`` or ``advance``
    advance departing rows -> store, between two batches training thread
    arrive  buffer -> slots and slab                     training thread, before they are looked up

Sum pooling is linear: pooled(all ids) = pooled(resident ids) + pooled(slab ids).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.common.spread import Spread
from recpipe.distributed.ranks import Channel, Ranks
from recpipe.plugin.api import Origin
from recpipe.plugin.policy import IN_STORE, CachePolicy, RowIds
from recpipe.tables.capabilities import Planned, SavesPlacement, ShowsRows
from recpipe.tables.collection import RowCollection, TierFigures
from recpipe.tables.rowtable import RowBags, looked_up
from recpipe.tables.skipping import RowFilter
from recpipe.tables.specs import Region, TableSet, Values
from recpipe.tables.stores.base import ColdStore, IoCounters, Records
from recpipe.tables.tiers import saved_placement
from recpipe.tables.tiers.moves import Moves
from recpipe.tables.tiers.occupied import Occupied
from recpipe.tables.tiers.placement import IndexBags, TierPlan, TierPlanner, table_bags
from recpipe.tables.tiers.policies import policy_bytes
from recpipe.tables.tiers.slots import Table, filter_slots, make_slots, put, take
from recpipe.tables.tiers.store_thread import StoreThread, TierTimes

_Bags = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Indices int64 [L], offsets int64 [F * B + 1] and, if ids have weights, these, float32 [L]."""


@dataclass(frozen=True)
class _Arriving:
    """A batch that ``advance`` has begun, until its rows are in their places."""

    plan: TierPlan
    carried: torch.Tensor
    """Records of the rows that stay in the slab."""
    places: list[torch.Tensor]
    """The last three of ``Moves.positions``."""


class TieredEmbeddingBagCollection(RowCollection, Planned, SavesPlacement, ShowsRows):
    """TorchRec's ``EmbeddingBagCollection`` interface (KJT in, KeyedTensor out) over tiers.

    Args:
        tables: the tables to store, of one dimension and optimizer; rows are summed by bag, or not pooled.
        policy: decides which rows are resident; its space says how many can be.
        store: the cold tier, which holds every row at first. It is owned: ``close`` closes it.
        device: where resident rows and slab live.
        prefetch: fetch a batch's rows while the batch before it trains. Off: fetch when its turn comes.
        ranks: the processes. Several trainers make the same plans; each holds a replica of resident rows and
            slab and looks up its own samples; ``trainers`` is the channel over which gradients are added.
        owner: the plugin that brought ``policy``, for messages.
        slab_rows: for how many rows the slab has room at first; a batch that needs more makes it larger.
    """

    def __init__(
        self,
        tables: TableSet,
        policy: CachePolicy,
        store: ColdStore,
        device: torch.device,
        prefetch: bool,
        ranks: Ranks | None = None,
        trainers: Channel | None = None,
        owner: Origin | None = None,
        slab_rows: int = 1,
    ) -> None:
        super().__init__(tables)
        self.store = store
        self.device = device
        self.prefetches = prefetch
        self._spread = Spread.beside(device)
        self.planner = TierPlanner(policy, prefetch, tables.pooled, owner, self._spread)
        self.times = TierTimes()
        self.ranks = ranks or Ranks()
        self._trainers = trainers if len(self.ranks.trainers) > 1 else None
        self.replicated = self._trainers is not None
        self.cold = StoreThread(store, device, self.times, self.ranks)
        self.resident = make_slots(tables, max(1, policy.space.slots), device, self._trainers)
        self.slab = make_slots(tables, slab_rows, device, self._trainers)
        self._planning = threading.RLock()
        self.slots = policy.space.slots
        self._occupied = Occupied(self.slots)
        self._slab_rows: RowIds = np.empty(0, np.int64)
        self._slab_written = True
        self._looked_up = self._hits = 0
        self._arriving: _Arriving | None = None
        self._ahead: RowIds = np.empty(0, np.int64)
        """The rows of the latest fetch."""
        self._rewritten: list[RowIds] = []
        """Rows that were replaced in the store since a batch's rows last arrived."""

    # -- the four calls ----------------------------------------------------------------------

    def bags(self, sparse: KeyedJaggedTensor) -> IndexBags:
        """The batch's lookups as rows, with features in the tables' order, independent of that in
        ``sparse``."""
        return table_bags(self.tables, sparse, self._spread)

    def plan(self, sparse: KeyedJaggedTensor) -> TierPlan:
        """Decide where the batch's lookups go and which rows move; ``advance`` must follow."""
        with self._planning:
            start = perf_counter()
            plan = self.planner.plan(self.bags(sparse))
            self.times.plan += perf_counter() - start
        return plan

    def prefetch(self, plan: TierPlan) -> None:
        """Start fetching the plan's rows, once ``advance`` of the batch before it has been called. A GPU also
        gets the numbers of the slots and slab rows to look up."""
        self._ahead = plan.fetch
        plan.fetched = self.cold.fetch(self._ahead)
        if self.cold.transfer.on_gpu and plan.shared is None:
            plan.sent = self.cold.transfer.send(_lookups(plan), narrow=True, spread=self._spread)

    def forget(self) -> None:
        """Undo a plan whose batch will not be trained because the epoch was left early."""
        with self._planning:
            self.planner.undo()

    def advance(self, plan: TierPlan) -> None:
        """After the last batch's update: send departing rows away; start the fetch if it is not started."""
        self.arrive()  # a batch that was skipped still has its rows
        start = perf_counter()
        self.cold.check_writes()
        with self._planning:
            self.planner.commit()
        moves = Moves.of(plan, self._slab_rows, self._slab_written)
        vacated, carried, leaving, promoted, *places = self.cold.transfer.send(moves.positions).use()
        departing = torch.cat((self._slab_records(), take(self.resident, vacated)))
        carried_records = self.cold.as_stored(departing[carried])
        self.cold.write(moves.written, departing if moves.all_leave else departing[leaving])
        if plan.fetched is None:
            self.prefetch(plan)
        self._slab_rows, self._slab_written = plan.slab, True
        self._occupied.carry_out(plan)
        self._looked_up += plan.looked_up
        self._hits += plan.hits
        # Carried rows that get a slot are there at once.
        put(self.resident, promoted, carried_records[: len(promoted)])
        self._arriving = _Arriving(plan, carried_records[len(promoted) :], places)
        self.times.advance += perf_counter() - start

    def arrive(self) -> None:
        """Wait for the batch's rows, if they have not arrived, and put them into their slots and the slab."""
        if self._arriving is None:
            return
        arriving, self._arriving = self._arriving, None
        plan, (slots, fetched_places, carried_places) = arriving.plan, arriving.places
        start = perf_counter()
        assert plan.fetched is not None, "advance has started the fetch"
        fetched = self._not_stale(plan.fetch, plan.fetched.result().use())
        plan.fetched = None
        self.times.wait += perf_counter() - start
        put(self.resident, slots, fetched[: len(slots)])
        self._reserve_slab(len(plan.slab))
        put(self.slab, fetched_places, fetched[len(slots) :])
        put(self.slab, carried_places, arriving.carried)
        self._slab_written = False

    def _not_stale(self, rows: RowIds, fetched: torch.Tensor) -> torch.Tensor:
        """``fetched`` records of ``rows``, with newer ones for rows that have been replaced since."""
        rewritten, self._rewritten = self._rewritten, []
        stale = (
            np.flatnonzero(np.isin(rows, np.concatenate(rewritten))) if rewritten else np.empty(0, np.int64)
        )
        if len(stale):
            fetched[self._index(stale)] = self.cold.fetch_now(rows[stale])
        return fetched

    def _index(self, positions: NDArray[np.integer[Any]]) -> torch.Tensor:
        """Positions as torch needs them: int64 on the device."""
        return self.cold.transfer.send([positions.astype(np.int64)]).use()[0]

    # -- lookups -----------------------------------------------------------------------------

    def lookup_resident(self, plan: TierPlan) -> torch.Tensor:
        """Pooled resident rows of all samples, float32 [B, F * D]; its backward updates them.

        Without pooling, rows float32 [L, D], zero for rows in the slab.
        """
        if plan.shared is not None:
            return self._shared_lookup(self.resident, *plan.shared.resident)
        return self._lookup(self.resident, self._on_device(plan)[0])

    def lookup_slab(self, plan: TierPlan) -> torch.Tensor:
        """Pooled slab rows of samples ``plan.cold_first ..``, float32 [B - cold_first, F * D].

        Without pooling, rows float32 [L, D], zero for resident rows.
        """
        if plan.shared is not None:
            rows = self._shared_lookup(self.slab, *plan.shared.slab)
        else:
            indices, offsets, weights = self._on_device(plan)[1]
            if not len(plan.slab):  # zeros, of which one was sent
                offsets = offsets.new_zeros(len(plan.slab_offsets))
            rows = self._lookup(self.slab, (indices, offsets, weights))
        if rows.requires_grad:
            rows.register_hook(self._slab_changes)  # type: ignore[no-untyped-call]
        return rows

    def _slab_changes(self, _gradient: torch.Tensor) -> None:
        """Note that the slab will change, so that an earlier write-back of it is not the last one."""
        self._slab_written = False

    def _on_device(self, plan: TierPlan) -> tuple[_Bags, _Bags]:
        """What to look up in the resident slots and in the slab."""
        found = list(map(torch.from_numpy, _lookups(plan))) if plan.sent is None else plan.sent.use()
        indices, offsets, slab_indices, slab_offsets, *weights = found
        own, slab = weights or (None, None)
        return (indices, offsets, own), (slab_indices, slab_offsets, slab)

    def _lookup(self, table: Table, bags: _Bags) -> torch.Tensor:
        rows: torch.Tensor = table(*bags)
        return rows

    def _shared_lookup(self, table: Table, bags: RowBags, touched: RowIds) -> torch.Tensor:
        pooled: torch.Tensor = table(bags, touched)
        return pooled

    def lookup(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        """Make all four calls and look up ``sparse``; in eval mode nothing is planned or moved."""
        if not self.training or not torch.is_grad_enabled():
            return self.read_now(sparse)
        return self.lookup_to_train(sparse)

    def lookup_to_train(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        """Make all four calls and look up; the result's backward pass must come before the next calls."""
        assert self._trainers is None, "several trainers plan whole batches: see pipeline.loader"
        return self.lookup_planned(self.plan(sparse))

    def lookup_planned(self, plan: TierPlan) -> torch.Tensor:
        """As ``lookup_to_train``, of what has been planned, and perhaps fetched, already."""
        self.advance(plan)
        self.arrive()
        pooled = self.lookup_resident(plan)
        return pooled + self.lookup_slab(plan) if len(plan.slab) else pooled

    def read_now(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        """The current rows in the form of ``lookup``, without gradient, for evaluation."""
        bags = self.bags(sparse)
        distinct, which = np.unique(bags.indices, return_inverse=True)
        weights = self.records_of(distinct)[:, : self.tables.dim]
        return looked_up(self.tables, weights, which, bags)

    def filter_updates(self, rows: RowFilter) -> None:
        """Leave rows out of both tiers' updates."""
        self.row_filter = rows
        filter_slots(self.resident, rows, lambda slots: self._occupied.rows[slots], self.tables)
        self._filter_slab()

    def _filter_slab(self) -> None:
        if self.row_filter is not None:
            filter_slots(self.slab, self.row_filter, lambda slots: self._slab_rows[slots], self.tables)

    # -- rows as they are between two batches ------------------------------------------------

    @contextmanager
    def quiesced(self) -> Iterator[None]:
        """In the block, every row is in its slot or in the store, as the last trained batch left it."""
        with self._planning:
            planned = self.planner.undo()
            self.arrive()
            if not self._slab_written:
                self.cold.write(self._slab_rows, self._slab_records())
                self._slab_written = True
            try:
                yield
            finally:
                if planned is not None:
                    self.planner.plan(planned)

    @property
    def resident_count(self) -> int:
        """How many rows are in slots."""
        return self._occupied.count

    def resident_rows(self) -> RowIds:
        """Rows that are in slots after the last trained batch, sorted, int64 [n]."""
        return self._occupied.resident()

    def resident_weights(self, rows: RowIds) -> torch.Tensor:
        """A copy of the weights of distinct resident ``rows``, float32 [n, D]."""
        self.arrive()  # a batch that was skipped still has its rows
        return take(self.resident, self._index(self._occupied.slots_of(rows)))[:, : self.tables.dim]

    def records_of(self, rows: RowIds) -> torch.Tensor:
        """Records of distinct ``rows`` as the last trained batch left them, float32 [n, width]."""
        with self.quiesced():
            return self.read_rows(rows)

    def replace_records(self, rows: RowIds, records: torch.Tensor) -> None:
        """Replace the records of distinct ``rows`` by ``records`` (float32 [n, width])."""
        with self.quiesced():
            self.write_rows(rows, records.cpu().numpy())

    def read_rows(self, rows: RowIds) -> torch.Tensor:
        """Records of distinct global ``rows`` (inside ``quiesced``), float32 [n, width] on the device."""
        where = self.planner.where[rows]
        cold = np.flatnonzero(where < 0)
        fetched = self.cold.fetch_now(rows[cold])
        if len(cold) == len(rows):
            return fetched
        hot = np.flatnonzero(where >= 0)
        records = torch.empty((len(rows), self.tables.layout.width), device=self.device)
        records[self._index(cold)] = fetched
        records[self._index(hot)] = take(self.resident, self._index(where[hot]))
        return records

    def write_rows(self, rows: RowIds, records: Records) -> None:
        """Replace the records of distinct global ``rows`` (inside ``quiesced``)."""
        where = self.planner.where[rows]
        hot, cold = np.flatnonzero(where >= 0), np.flatnonzero(where < 0)
        put(self.resident, self._index(where[hot]), torch.from_numpy(records[hot]).to(self.device))
        # The next batch may take a row from the slab instead of the store.
        held = np.flatnonzero(where < IN_STORE)
        positions = torch.from_numpy(-2 - where[held].astype(np.int64)).to(self.device)
        put(self.slab, positions, torch.from_numpy(records[held]).to(self.device))
        self.cold.write_now(rows[cold], records[cold])
        if len(self._ahead):
            self._rewritten.append(np.intersect1d(rows[cold], self._ahead))

    def read(self, region: Region) -> Values:
        """Current weights and optimizer state of ``region``."""
        records = self.records_of(self.rows_of(region)).cpu().numpy()
        return records[:, : self.tables.dim], records[:, self.tables.dim :]

    def write(self, region: Region, values: Values) -> None:
        """Replace weights and optimizer state of ``region``."""
        with self.quiesced():
            self.write_rows(self.rows_of(region), np.concatenate(values, axis=1))

    def placement_state(self) -> dict[str, Any]:
        """The resident rows, the policy's state and its decision for the next batch, so that a resumed run
        makes the same decisions."""
        with self.quiesced():
            return saved_placement.placement_state(self.planner)

    def check_placement_state(self, state: Mapping[str, Any]) -> None:
        """``Damaged`` if ``state`` cannot be a result of ``placement_state``."""
        saved_placement.check_placement(self.planner, state)

    def load_placement_state(self, state: dict[str, Any] | None) -> bool:
        """Assign the saved resident rows to their slots; rows that were resident before are forgotten. The
        tables are loaded afterwards and fill the slots.

        False if the checkpoint is from a run with another policy or budget. Training then continues exactly,
        but no row is resident at first.
        """
        planner = self.planner
        if state is None or not saved_placement.same_place(planner, state):
            return False
        with self.quiesced():
            used = np.flatnonzero(state["row_of_slot"] >= 0)
            for part in np.array_split(used, max(1, len(used) // 65_536)):
                fetched = self.cold.fetch_now(state["row_of_slot"][part])
                put(self.resident, self._index(part), fetched)
            saved_placement.restore(planner, state)
            self._occupied.restore(state["row_of_slot"])
        return True

    # -- the rest ----------------------------------------------------------------------------

    @property
    def io(self) -> IoCounters:
        """What training moved, without evaluation and checkpoints (``store.io`` has everything)."""
        return self.cold.counters.plus(self.store.background())

    @property
    def slab_room(self) -> int:
        """For how many rows the slab has room."""
        return int(self.slab.weights.shape[0])

    @property
    def resident_bytes(self) -> int:
        """Device memory of resident rows and their optimizer state."""
        return self.planner.space.slots * self.tables.record_bytes

    @property
    def overhead_bytes(self) -> int:
        """Memory beyond the resident rows: row maps, the policy's tables, the slab, the store's buffers."""
        return (
            self.planner.overhead_bytes
            + policy_bytes(self.planner.policy)
            + sum(part.numel() * 4 for part in (self.slab.weights, self.slab.state))
            + self.store.overhead_bytes
        )

    def tier_figures(self) -> TierFigures:
        """Traffic, times and memory."""
        return TierFigures(
            self.io,
            self.times,
            self.store.direct,
            self.resident_bytes,
            self.store.cold_bytes,
            self.overhead_bytes,
            self._occupied.cold_start,
            self._looked_up,
            self._hits,
        )

    def write_back(self) -> None:
        """Write the slab's rows, and wait for the store; residents are in their tier."""
        with self.quiesced():
            self.cold.flush()

    def close(self) -> None:
        """Write what is left, wait for the store, and release it."""
        try:
            with self.quiesced():
                pass  # it has written the slab back
        finally:
            self._spread.close()
            self.cold.close()

    def _slab_records(self) -> torch.Tensor:
        return take(self.slab, torch.arange(len(self._slab_rows), device=self.device))

    def _reserve_slab(self, rows: int) -> None:
        """Make room for ``rows`` slab rows; ``advance`` has taken out what it held."""
        if rows > self.slab_room:
            self.slab = make_slots(self.tables, 1 << (rows - 1).bit_length(), self.device, self._trainers)
            self._filter_slab()


def _lookups(plan: TierPlan) -> list[NDArray[Any]]:
    """What is looked up in both tiers, as ``TierPlan.sent`` has it."""
    slab_offsets = plan.slab_offsets if len(plan.slab) else plan.slab_offsets[:1]
    weights = (plan.weights, plan.slab_weights)
    return [
        *(plan.indices, plan.offsets, plan.slab_indices, slab_offsets),
        *(w for w in weights if w is not None),
    ]
