"""``TieredEmbeddingBagCollection``: tables larger than device memory, exact under every cache policy: each
update is the one that a single big table would make.

Sum pooling is linear: pooled(all ids) = pooled(resident ids) + pooled(slab ids). A row is in one of three
places: a **resident** slot (a TBE of ``slots`` rows), the **slab** (rows that one batch alone needs) or the
**cold store**. It moves with its optimizer state. A batch passes through the calls of ``GroupTables`` in
their order. The rules that keep every bit:

    a fetch sees every write that was queued before it (``StoreThread``)
    rows that stay on the device between two batches do not pass through the store (``TierPlan.carried_from``)
    a store that rounds rounds these, too (``StoreThread.as_stored``)
    rows that are replaced while a fetch of them is under way are fetched anew (``wait``)
    between two batches, plans are undone and the slab is written back (``between``)
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.common.device import given_so_far
from recpipe.distributed.ranks import Channel, Ranks
from recpipe.plugin.bags import Bags, RowIds
from recpipe.plugin.calls import Owned
from recpipe.plugin.collection import TierFigures, TierTimes
from recpipe.plugin.policy import Cache, CachePolicy
from recpipe.plugin.skipper import RowFilter
from recpipe.plugin.store import ColdStore, IoCounters
from recpipe.plugin.tables import TableSet
from recpipe.tables.collection import read_rows_of
from recpipe.tables.group_rows import GraphLookup, GroupRows, GroupTables
from recpipe.tables.rows import table_bags
from recpipe.tables.tiers.between import BetweenBatches, InStore
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
class Now(InStore):
    """What changes from batch to batch. These are no attributes of the collection, since ``nn.Module`` looks
    at each value that it is given, which takes longer than all else that is done with a number."""

    arriving: TieredRows | None = None
    """The batch that has advanced, until its rows are in their places."""
    used: list[torch.Tensor] = field(default_factory=list)
    """What the latest batch's moves and lookups have come in from other streams. It is kept until the batch
    after it begins, since to hand each tensor over to the training's stream would take longer."""
    looked_up: int = 0
    hits: int = 0


class TieredEmbeddingBagCollection(BetweenBatches, GroupTables):
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
    now: Now

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

    def renew(self, rows: RowIds, records: torch.Tensor) -> None:
        self.replace_records(rows, records)

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
        return read_rows_of(self, sparse, self._spread)

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
