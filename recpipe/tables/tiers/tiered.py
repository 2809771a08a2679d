"""``TieredEmbeddingBagCollection``: tables larger than device memory, exact under every cache policy: each
update is the one that a single big table would make.

Sum pooling is linear: pooled(all ids) = pooled(resident ids) + pooled(slab ids). A row is in one of three
places: a **resident** slot (a TBE of ``slots`` rows), the **slab** (rows that one batch alone needs) or the
**cold store**. It moves with its optimizer state. A batch passes through the calls of ``GroupTables`` in
their order. The rules that keep every bit:

    a fetch sees every write that was queued before it (``store_thread``)
    rows that stay on the device between two batches do not pass through the store (``TierPlan.carried_from``)
    a store that rounds rounds these, too (``StoreThread.as_stored``)
    rows that are replaced while a fetch of them is under way are fetched anew (``wait``)
    between two batches, plans are undone and the slab is written back (``quiesced``)
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.common.device import given_so_far
from recpipe.distributed.ranks import Channel, Ranks
from recpipe.plugin.bags import Bags, RowIds
from recpipe.plugin.calls import Owned
from recpipe.plugin.collection import TierFigures, TierTimes
from recpipe.plugin.policy import IN_STORE, Cache, CachePolicy
from recpipe.plugin.skipper import RowFilter
from recpipe.plugin.store import ColdStore, IoCounters, Records
from recpipe.plugin.tables import TableSet
from recpipe.tables.collection import RowCollection, SavesPlacement, ShowsRows
from recpipe.tables.group_rows import GraphLookup, GroupRows, GroupTables
from recpipe.tables.rows import looked_up, table_bags
from recpipe.tables.tiers.gpu_lookups import Finder, GpuBags, GpuLookups
from recpipe.tables.tiers.layout import (
    FusedTable,
    Layout,
    MakeTable,
    OneTable,
    Section,
    SharedTable,
    TwoTables,
)
from recpipe.tables.tiers.lookups import CpuLookups, Lookups, SharedLookups, parted
from recpipe.tables.tiers.plan import Moves, Occupied, TierPlan
from recpipe.tables.tiers.planner import TierPlanner
from recpipe.tables.tiers.policies import policy_bytes
from recpipe.tables.tiers.transfer import Sent, StoreThread


class TieredRows(GroupRows):
    """A batch's rows in tiers."""

    plan: TierPlan

    def __init__(
        self,
        tables: TieredEmbeddingBagCollection,
        ids: KeyedJaggedTensor,
        plan: TierPlan,
        lookups: Lookups,
    ) -> None:
        super().__init__(tables, ids)
        self.plan, self.lookups, self._shared = plan, lookups, tables.replicated
        self.begun = False
        """Whether the batch's turn has come, so that its plan is not undone any more."""
        self.moves: Moves | None = None
        """Where its rows move, once that has been found out."""
        self.places: Sent | None = None
        """The positions of ``moves``, on the way to the device."""
        self.fetched: Future[Sent] | None = None
        """The fetch of ``plan.fetch``'s rows, once it has been started."""
        self.arriving: tuple[torch.Tensor, torch.Tensor] | None = None
        """Until the rows are in their places: the places of the fetched rows and then of those that stay on
        the device, and the records of these."""

    @property
    def needs_cold(self) -> NDArray[np.bool_]:
        return self.lookups.needs_cold

    def arrange(self, samples: NDArray[np.int64], cold_first: int) -> None:
        self.cold_first = cold_first
        if self._shared:
            assert isinstance(self.lookups, CpuLookups), "several trainers plan on the CPU"
            self.lookups = SharedLookups(self.lookups, samples, cold_first, len(self.plan.slab))
        else:
            assert isinstance(self.lookups, CpuLookups | GpuLookups), "arranged once"
            self.lookups = self.lookups.permuted(samples, cold_first)


@dataclass
class Now:
    """What changes from batch to batch. These are no attributes of the collection, since ``nn.Module`` looks
    at each value that it is given, which takes longer than all else that is done with a number."""

    arriving: TieredRows | None = None
    """The batch that has advanced, until its rows are in their places."""
    slab_written: bool = True
    """Whether the store has the slab's rows as they are."""
    ahead: RowIds = field(default_factory=lambda: np.empty(0, np.int64))
    """The rows of the latest fetch."""
    used: list[torch.Tensor] = field(default_factory=list)
    """What the latest batch's moves and lookups have come in from other streams. It is kept until the batch
    after it begins, since to hand each tensor over to the training's stream would take longer."""
    rewritten: list[RowIds] = field(default_factory=list)
    """Rows that were replaced in the store since a batch's rows last arrived."""
    looked_up: int = 0
    hits: int = 0


class TieredEmbeddingBagCollection(RowCollection, GroupTables, SavesPlacement, ShowsRows):
    """TorchRec's ``EmbeddingBagCollection`` interface (KJT in, KeyedTensor out) over tiers.

    Args:
        tables: the tables to store, of one dimension and optimizer; rows are summed by bag, or not pooled.
        policy: decides which rows are resident; its space says how many can be. The space's threads are
            owned: ``close`` ends them.
        store: the cold tier, which holds every row at first. It is owned: ``close`` closes it.
        device: where resident rows and slab live.
        prefetch: fetch a batch's rows while the batch before it trains. Off: fetch when its turn comes.
        ranks: the processes. Several trainers make the same plans; each holds a replica of resident rows and
            slab and looks up its own samples; ``trainers`` is the channel over which gradients are added.
        owner: the plugin's part that made ``policy``, for messages.
        slab_rows: for how many rows the slab has room at first; a batch that needs more makes it larger.
    """

    moves = True

    def __init__(
        self,
        tables: TableSet,
        policy: CachePolicy,
        store: ColdStore,
        device: torch.device,
        prefetch: bool,
        ranks: Ranks | None = None,
        trainers: Channel | None = None,
        owner: Owned[Cache] | None = None,
        slab_rows: int = 1,
    ) -> None:
        super().__init__(tables)
        self.store, self.device, self.prefetches = store, device, prefetch
        self.frozen = tables.optimizer.frozen
        """Whether the store always has every row as it is, so that none is written back."""
        self._spread = policy.space.spread
        self.planner = TierPlanner(policy, prefetch, owner)
        self.times = TierTimes()
        ranks = ranks or Ranks()
        self.replicated = trainers is not None and len(ranks.trainers) > 1
        self.cold = StoreThread(store, device, self.times, ranks)
        on_gpu = device.type == "cuda" and not self.replicated
        self._finder: Finder | None = None
        if on_gpu:  # it finds the distinct rows of a batch
            self._finder, self.finds_ahead = Finder(tables, self.cold.transfer, self._spread), True
        self._planning = threading.RLock()
        self.slots = policy.space.slots
        self.occupied = Occupied(self.slots)
        make: MakeTable = partial(FusedTable, tables, device=device)
        if self.replicated and trainers is not None:
            make = partial(SharedTable, tables, device=device, channel=trainers)
        parts, slots = (tables, self.occupied, self.cold.transfer, make), max(1, self.slots)
        self.layout: Layout
        if on_gpu:
            self.layout = OneTable(*parts, slots, slab_rows)
        else:
            self.layout = TwoTables(*parts, Section.of(make(slots)), slab_rows)
        self.now = Now()

    # -- a batch -----------------------------------------------------------------------------

    @property
    def waited(self) -> float:
        return self.times.wait

    def find(self, ids: KeyedJaggedTensor) -> GpuBags | None:
        return None if self._finder is None else self._finder.bags(ids)

    def input_dist(self, ids: KeyedJaggedTensor, found: Bags | GpuBags | None = None) -> TieredRows:
        """Decide where the batch's lookups go and which rows move; ``advance`` must follow."""
        with self._planning:
            start = perf_counter()
            if found is None and self.finds_ahead:
                found = self.find(ids)
            bags = table_bags(self.tables, ids, self._spread) if found is None else found
            plan, pooled = self.planner.plan(bags), self.tables.pooled
            if isinstance(bags, GpuBags):
                lookups: Lookups = GpuLookups(bags, plan.where, pooled, bags.batch_size)
            else:
                lookups = parted(bags, plan.where, pooled)
            self.times.plan += perf_counter() - start
        return TieredRows(self, ids, plan, lookups)

    def forget(self) -> None:
        """Undo a plan whose batch will not be trained because the epoch was left early."""
        with self._planning:
            self.planner.undo()

    def prefetch(self, rows: TieredRows) -> None:
        """Start to fetch the batch's rows, and to make what will be looked up on a GPU.

        Called for a batch while the one before it trains, this finds out how its rows will move, too.
        """
        self.now.ahead = rows.plan.fetch
        rows.fetched = self.cold.fetch(self.now.ahead)
        if rows.moves is None:
            rows.moves = self.layout.moves(rows.plan, slab_written=False)
            rows.places = self.layout.prepare(rows.lookups, rows.moves)
        else:
            self.layout.prepare(rows.lookups, None)

    def begin(self, rows: TieredRows) -> None:
        """Note that the batch's turn has come, so that its plan is not undone any more."""
        with self._planning:
            self.planner.commit()
        rows.begun = True

    def advance(self, rows: TieredRows) -> None:
        """After the last batch's update and its ``wait``: send departing rows away, and put carried ones that
        get a slot there, which may be looked up before ``wait``; start the fetch if it is not started.

        Where both tiers are looked up at once, slab rows among them, that is after ``wait``, which then puts
        all of them in their places together.
        """
        self.wait()  # a batch that was skipped still has its rows
        start, plan, layout = perf_counter(), rows.plan, self.layout
        self.cold.check_writes()
        if not rows.begun:
            self.begin(rows)
        written = self.now.slab_written
        moves, sent = rows.moves, rows.places
        here = layout.slab.first, layout.together
        fits = moves is not None and (moves.slab_first, moves.together) == here
        if moves is None or sent is None or not fits or (written and not self.frozen):
            # Found out ahead, they are those after a batch that trains its slab, in the same layout.
            moves = layout.moves(plan, written)
            sent = self.cold.transfer.send(*moves.positions)
        *places, targets = sent.use(kept=True)
        leaving, carried = layout.depart(moves, *places)
        self.cold.write(moves.written, leaving, self.now.used)
        self.now.used = [targets]
        carried = carried if self.frozen else self.cold.as_stored(carried)
        rows.moves = moves
        if rows.fetched is None:
            self.prefetch(rows)
        grown = layout.reserved(len(plan.slab))
        if grown is not layout:
            self.layout, moves = grown, grown.moves(plan, written)
            rows.moves = moves
            targets = self._index(moves.targets)
        self.occupied.carry_out(plan)
        self.now.slab_written = True
        if moves.promoted and not (grown.looks_up_at_once(rows.lookups) and len(plan.slab)):
            fetched, promoted, others = targets.tensor_split((moves.fetched, moves.fetched + moves.promoted))
            grown.resident.put(promoted, carried[: moves.promoted])
            targets, carried = torch.cat((fetched, others)), carried[moves.promoted :]
        rows.arriving, self.now.arriving = (targets, carried), rows
        self.now.looked_up += plan.looked_up
        self.now.hits += plan.hits
        self.times.advance += perf_counter() - start

    def wait(self) -> None:
        """Wait for the batch's rows, if they have not arrived, and put them into their slots and the slab."""
        rows, self.now.arriving = self.now.arriving, None
        if rows is None:
            return
        assert rows.arriving is not None, "it has advanced"
        assert rows.moves is not None, "it has advanced"
        assert rows.fetched is not None, "advance has started the fetch"
        (targets, carried), rows.arriving = rows.arriving, None
        moves, rows.moves = rows.moves, None
        fetching, rows.fetched = rows.fetched, None
        if fetching.done():
            sent = fetching.result()
        else:
            # The wait counts if the device has nothing left to do by its end: a GPU that is still training
            # the batch before has lost no time.
            has_done, start = given_so_far(self.device), perf_counter()
            sent = fetching.result()
            if has_done():
                self.times.wait += perf_counter() - start
        (fetched,) = sent.use(kept=True)
        rewritten, self.now.rewritten = self.now.rewritten, []
        if rewritten:  # rows that have been replaced since they were fetched
            stale = np.flatnonzero(np.isin(rows.plan.fetch, np.concatenate(rewritten)))
            if len(stale):
                fetched[self._index(stale)] = self.cold.fetch_now(rows.plan.fetch[stale])
        self.now.used.append(fetched)
        self.layout.put(moves, targets, fetched, carried)
        self.now.slab_written = self.frozen

    def compute(
        self, rows: TieredRows, warm: bool, cold: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Look up the resident rows (``warm``), the slab's (``cold``), or both, in the layout's own way."""
        in_slab = len(rows.plan.slab) > 0
        found, slab = self.layout.look_up(rows.lookups, in_slab, warm, cold)
        self.now.used += rows.lookups.made
        changing = found if slab is None else slab
        if cold and in_slab and changing is not None and changing.requires_grad:
            changing.register_hook(self._slab_changes)  # type: ignore[no-untyped-call]
        return found, slab

    def _slab_changes(self, _gradient: torch.Tensor) -> None:
        """Note that the slab will change, so that an earlier write-back of it is not the last one."""
        self.now.slab_written = self.frozen

    def graph_lookup(self, rows: TieredRows) -> GraphLookup | None:
        found = self.layout.graph_lookup(rows.lookups, rows.ids.stride())
        self.now.used += rows.lookups.made
        return found

    def filter_updates(self, rows: RowFilter) -> None:
        self.row_filter = rows
        self.layout.filter_updates(rows)

    # -- a lookup without the pipeline -------------------------------------------------------

    def lookup(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        """Make all calls and look up ``sparse``, whose backward pass must come before the next calls; in eval
        mode nothing is planned or moved."""
        if not self.training or not torch.is_grad_enabled():
            return self.read_now(sparse)
        assert not self.replicated, "several trainers plan whole batches: see pipeline.loader"
        return self.look_up_now(self.input_dist(sparse))

    def look_up_now(self, rows: TieredRows) -> torch.Tensor:
        """The remaining calls for a batch that has been taken in, and perhaps fetched or advanced."""
        if not rows.begun:
            self.advance(rows)
        self.wait()
        warm, cold = self.compute(rows, True, True)
        assert warm is not None, "asked for"
        return warm if cold is None else warm + cold

    def read_now(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        """The current rows in the form of ``lookup``, without gradient, for evaluation."""
        bags = table_bags(self.tables, sparse, self._spread)
        distinct, which = np.unique(bags.rows, return_inverse=True)
        weights = self.records_of(distinct)[:, : self.tables.dim]
        return looked_up(self.tables, weights, which, bags)

    # -- rows as they are between two batches ------------------------------------------------

    @contextmanager
    def quiesced(self) -> Iterator[None]:
        """In the block, every row is in its slot or in the store, as the last trained batch left it."""
        with self._planning:
            planned = self.planner.undo()
            self.wait()
            if not self.now.slab_written:
                self.cold.write(self.occupied.slab, self.layout.slab_records())
                self.now.slab_written = True
            try:
                yield
            finally:
                if planned is not None:
                    self.planner.plan(planned)

    @property
    def resident_count(self) -> int:
        return self.occupied.count

    def resident_rows(self) -> RowIds:
        return np.sort(self.occupied.rows[self.occupied.rows >= 0])

    def resident_weights(self, rows: RowIds) -> torch.Tensor:
        self.wait()  # a batch that was skipped still has its rows
        held = self.occupied.rows
        used = np.flatnonzero(held >= 0)
        used = used[np.argsort(held[used])]
        slots = used[np.searchsorted(held[used], rows)]
        assert np.array_equal(held[slots], rows), "the rows are resident"
        return self.layout.resident.take(self._index(slots))[:, : self.tables.dim]

    def records_of(self, rows: RowIds) -> torch.Tensor:
        with self.quiesced():
            return self.read_rows(rows)

    def replace_records(self, rows: RowIds, records: torch.Tensor) -> None:
        with self.quiesced():
            self.write_rows(rows, records.cpu().numpy())

    def read_rows(self, rows: RowIds) -> torch.Tensor:
        """Records of distinct global ``rows`` (inside ``quiesced``), float32 [n, width] on the device."""
        where = self.planner.where[rows]
        hot, cold = np.flatnonzero(where >= 0), np.flatnonzero(where < 0)
        fetched = self.cold.fetch_now(rows[cold])
        if not len(hot):
            return fetched
        records = torch.empty((len(rows), self.tables.layout.width), device=self.device)
        records[self._index(cold)] = fetched
        records[self._index(hot)] = self.layout.resident.take(self._index(where[hot]))
        return records

    def write_rows(self, rows: RowIds, records: Records) -> None:
        """Replace the records of distinct global ``rows`` (inside ``quiesced``). The store gets all of those
        that are never written back."""
        where = self.planner.where[rows]
        hot, cold = np.flatnonzero(where >= 0), np.flatnonzero(where < 0)
        if self.frozen:
            cold = np.arange(len(rows))
            records = self.cold.as_stored(torch.from_numpy(records)).numpy()
        resident = torch.from_numpy(records[hot]).to(self.device)
        self.layout.resident.put(self._index(where[hot]), resident)
        # The next batch may take a row from the slab instead of the store.
        held = np.flatnonzero(where < IN_STORE)
        positions = torch.from_numpy(-2 - where[held].astype(np.int64)).to(self.device)
        self.layout.slab.put(positions, torch.from_numpy(records[held]).to(self.device))
        self.cold.write_now(rows[cold], records[cold])
        if len(self.now.ahead):
            self.now.rewritten.append(np.intersect1d(rows[cold], self.now.ahead))

    def placement_state(self) -> dict[str, Any]:
        with self.quiesced():
            return self.planner.state()

    def check_placement_state(self, state: Mapping[str, Any]) -> None:
        self.planner.check_state(state)

    def load_placement_state(self, state: dict[str, Any] | None) -> bool:
        """Assign the saved resident rows to their slots; rows that were resident before are forgotten.

        The slots get the rows that the store has, and what was saved of them if the store rounds. Tables that
        were not made with the saved rows are loaded afterwards.

        False if the checkpoint is from a run with another policy or budget. Training then continues exactly,
        but no row is resident at first.
        """
        if state is None or not self.planner.has_made(state):
            return False
        row_of_slot = state["row_of_slot"]
        used = np.flatnonzero(row_of_slot >= 0)
        with self.quiesced():
            for part in np.array_split(used, max(1, len(used) // 65_536)):
                self.layout.resident.put(self._index(part), self.cold.fetch_now(row_of_slot[part]))
            self.occupied.restore(row_of_slot)
            self.planner.load_state(state)
            if self.store.rounded is None or self.frozen:
                return True
            # The store rounds: resident rows are replaced by what was saved of them.
            resident = self.resident_rows()
            saved = {table.name for table in self.tables.tables if table.saved is not None}
            for region in self.regions():
                here = self.rows_of(region)
                rows = resident[slice(*np.searchsorted(resident, (here[0], here[-1] + 1)))]
                if region.table in saved and len(rows):
                    records = self.tables.fill(region.table, region.start, region.stop)
                    self.write_rows(rows, records[rows - here[0]])
        return True

    # -- the rest ----------------------------------------------------------------------------

    @property
    def io(self) -> IoCounters:
        """What training moved, without evaluation and checkpoints (``store.io`` has everything)."""
        return self.cold.counters.plus(self.store.background())

    def tier_figures(self) -> TierFigures:
        space, slab = self.planner.space, self.layout.slab
        # Beyond the resident rows: row maps, the policy's tables, the slab, the store's buffers.
        beside = space.residents.nbytes + self.occupied.rows.nbytes + policy_bytes(self.planner.policy)
        beside += 4 * (slab.weights.numel() + slab.state.numel()) + self.store.overhead_bytes
        return TierFigures(
            self.io,
            self.times,
            self.store.direct,
            space.slots * self.tables.record_bytes,
            self.store.cold_bytes,
            beside,
            self.occupied.cold_start,
            self.now.looked_up,
            self.now.hits,
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
            self.cold.transfer.let_go(self.now.used)
            self.now.used = []
            self._spread.close()
            self.cold.close()

    def _index(self, positions: NDArray[np.integer[Any]]) -> torch.Tensor:
        """Positions as torch needs them: int64 on the device."""
        return self.cold.transfer.send(positions).use()[0]
