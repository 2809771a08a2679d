"""Moves the rows of batches between tiers, so that each update is the one that a single big table would make.

A row is in one of three places: a **resident** slot (a TBE of ``slots`` rows), the **slab** (rows that one
batch alone needs) or the **cold store**. It moves with its optimizer state. A batch passes through the calls
of ``GroupTables`` in their order. The rules that keep every bit:

    a fetch sees every write that was queued before it (``store_thread``)
    rows that stay on the device between two batches do not pass through the store (``TierPlan.carried_from``)
    a store that rounds rounds these, too (``StoreThread.as_stored``)
    rows that are replaced while a fetch of them is under way are fetched anew (``_not_stale``)
    between two batches, plans are undone and the slab is written back (``quiesced``)
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.common.device import given_so_far
from recpipe.common.plain_attributes import PlainAttributes
from recpipe.distributed.ranks import Channel, Ranks
from recpipe.plugin.bags import IndexBags, RowIds
from recpipe.plugin.calls import Owned
from recpipe.plugin.collection import TierTimes
from recpipe.plugin.policy import Cache, CachePolicy
from recpipe.plugin.skipper import RowFilter
from recpipe.plugin.store import ColdStore
from recpipe.plugin.tables import TableSet
from recpipe.tables.collection import RowCollection
from recpipe.tables.group_rows import GraphLookup, GroupRows, GroupTables
from recpipe.tables.rows import table_bags
from recpipe.tables.tiers.gpu_lookups import Finder, GpuBags, GpuLookups
from recpipe.tables.tiers.layout import Layout, Section
from recpipe.tables.tiers.lookups import CpuLookups, Lookups, parted
from recpipe.tables.tiers.moves import Moves
from recpipe.tables.tiers.occupied import Occupied
from recpipe.tables.tiers.one_table import OneTable
from recpipe.tables.tiers.plan import TierPlan
from recpipe.tables.tiers.planner import TierPlanner
from recpipe.tables.tiers.shared_table import SharedLookups, SharedTable
from recpipe.tables.tiers.slots import FusedTable, SlotTable
from recpipe.tables.tiers.store_thread import StoreThread
from recpipe.tables.tiers.transfer import Landed, Sent
from recpipe.tables.tiers.two_tables import TwoTables


class TieredRows(GroupRows):
    """A batch's rows in tiers."""

    plan: TierPlan

    def __init__(
        self,
        tables: TierEngine,
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
        self.fetched: Future[Landed] | None = None
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


class TierEngine(PlainAttributes, RowCollection, GroupTables):
    """The rows of one group in its tiers, as batches come and go. Arguments are those of
    ``TieredEmbeddingBagCollection``."""

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
        self.ranks = ranks or Ranks()
        trainers = trainers if len(self.ranks.trainers) > 1 else None
        self.replicated = trainers is not None
        self.cold = StoreThread(store, device, self.times, self.ranks)
        on_gpu = device.type == "cuda" and trainers is None
        self._finder = Finder(tables, self.cold.transfer, self._spread) if on_gpu else None
        self._planning = threading.RLock()
        self.slots = policy.space.slots
        self.occupied = Occupied(self.slots)
        slots = max(1, self.slots)
        make, transfer = partial(_slot_table, tables, device, trainers), self.cold.transfer
        self.layout: Layout
        if on_gpu:
            self.layout = OneTable(tables, self.occupied, transfer, slots, slab_rows, make)
        else:
            resident = Section.of(make(slots))
            self.layout = TwoTables(tables, self.occupied, transfer, resident, slab_rows, make)
        self.arriving: TieredRows | None = None
        """The batch that has advanced, until its rows are in their places."""
        self._slab_written = True
        """Whether the store has the slab's rows as they are."""
        self._ahead: RowIds = np.empty(0, np.int64)
        """The rows of the latest fetch."""
        self._used: list[torch.Tensor] = []
        """What the latest batch's moves and lookups have come in from other streams. It is kept until the
        batch after it begins, since to hand each tensor over to the training's stream would take longer."""
        self._rewritten: list[RowIds] = []
        """Rows that were replaced in the store since a batch's rows last arrived."""
        self._looked_up = self._hits = 0

    # -- a batch -----------------------------------------------------------------------------

    @property
    def finds_ahead(self) -> bool:  # type: ignore[override]
        """Whether a GPU finds the distinct rows of a batch."""
        return self._finder is not None

    @property
    def waited(self) -> float:
        """Seconds for which training has waited for rows so far."""
        return self.times.wait

    def find(self, ids: KeyedJaggedTensor) -> GpuBags | None:
        """The batch's lookups, of which a GPU has found the distinct rows."""
        return None if self._finder is None else self._finder.bags(ids)

    def input_dist(self, ids: KeyedJaggedTensor, found: IndexBags | GpuBags | None = None) -> TieredRows:
        """Decide where the batch's lookups go and which rows move; ``advance`` must follow."""
        with self._planning:
            start = perf_counter()
            bags = self.find(ids) if found is None else found
            bags = table_bags(self.tables, ids, self._spread) if bags is None else bags
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
        self._ahead = rows.plan.fetch
        rows.fetched = self.cold.fetch(self._ahead)
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
        written = self._slab_written
        moves, sent = rows.moves, rows.places
        if moves is None or sent is None or (written and not self.frozen) or not layout.fits(moves):
            # Found out ahead, they are those after a batch that trains its slab, in the same layout.
            moves = layout.moves(plan, written)
            sent = self.cold.transfer.send(*moves.positions)
        *places, targets = sent.use(kept=True)
        leaving, carried = layout.depart(moves, *places)
        self.cold.write(moves.written, leaving, self._used)
        self._used = [targets]
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
        self._slab_written = True
        if moves.promoted and not (grown.looks_up_at_once(rows.lookups) and len(plan.slab)):
            fetched, promoted, others = targets.tensor_split((moves.fetched, moves.fetched + moves.promoted))
            grown.resident.put(promoted, carried[: moves.promoted])
            targets, carried = torch.cat((fetched, others)), carried[moves.promoted :]
        rows.arriving, self.arriving = (targets, carried), rows
        self._looked_up += plan.looked_up
        self._hits += plan.hits
        self.times.advance += perf_counter() - start

    def wait(self) -> None:
        """Wait for the batch's rows, if they have not arrived, and put them into their slots and the slab."""
        rows, self.arriving = self.arriving, None
        if rows is None:
            return
        assert rows.arriving is not None, "it has advanced"
        assert rows.moves is not None, "it has advanced"
        assert rows.fetched is not None, "advance has started the fetch"
        (targets, carried), rows.arriving = rows.arriving, None
        moves, rows.moves = rows.moves, None
        landed, rows.fetched = self._awaited(rows.fetched), None
        fetched = self._not_stale(rows.plan.fetch, landed.use(kept=True))
        self._used.append(fetched)
        self.layout.put(moves, targets, fetched, carried)
        self._slab_written = self.frozen

    def _awaited(self, fetched: Future[Landed]) -> Landed:
        """The fetched records. A wait counts if the device has nothing left to do by its end: a GPU that is
        still training the batch before has lost no time."""
        if fetched.done():
            return fetched.result()
        has_done, start = given_so_far(self.device), perf_counter()
        landed = fetched.result()
        if has_done():
            self.times.wait += perf_counter() - start
        return landed

    def _not_stale(self, rows: RowIds, fetched: torch.Tensor) -> torch.Tensor:
        """``fetched`` records of ``rows``, with newer ones for rows that have been replaced since."""
        rewritten, self._rewritten = self._rewritten, []
        if rewritten:
            stale = np.flatnonzero(np.isin(rows, np.concatenate(rewritten)))
            if len(stale):
                fetched[self._index(stale)] = self.cold.fetch_now(rows[stale])
        return fetched

    def compute(
        self, rows: TieredRows, warm: bool, cold: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Look up the resident rows (``warm``), the slab's (``cold``), or both, in the layout's own way."""
        in_slab = len(rows.plan.slab) > 0
        found, slab = self.layout.look_up(rows.lookups, in_slab, warm, cold)
        self._used += rows.lookups.made
        changing = found if slab is None else slab
        if cold and in_slab and changing is not None and changing.requires_grad:
            changing.register_hook(self.slab_changes)  # type: ignore[no-untyped-call]
        return found, slab

    def slab_changes(self, _gradient: torch.Tensor) -> None:
        """Note that the slab will change, so that an earlier write-back of it is not the last one."""
        self._slab_written = self.frozen

    def graph_lookup(self, rows: TieredRows) -> GraphLookup | None:
        """The lookup of all rows for a graph of kernels, where the layout has one."""
        found = self.layout.graph_lookup(rows.lookups, rows.ids.stride())
        self._used += rows.lookups.made
        return found

    def filter_updates(self, rows: RowFilter) -> None:
        """Leave rows out of both tiers' updates."""
        self.row_filter = rows
        self.layout.filter_updates(rows)

    # -- rows as they are between two batches ------------------------------------------------

    @contextmanager
    def quiesced(self) -> Iterator[None]:
        """In the block, every row is in its slot or in the store, as the last trained batch left it."""
        with self._planning:
            planned = self.planner.undo()
            self.wait()
            if not self._slab_written:
                self.cold.write(self.occupied.slab, self.layout.slab_records())
                self._slab_written = True
            try:
                yield
            finally:
                if planned is not None:
                    self.planner.plan(planned)

    def _index(self, positions: NDArray[np.integer[Any]]) -> torch.Tensor:
        """Positions as torch needs them: int64 on the device."""
        return self.cold.transfer.send(positions).use()[0]


def _slot_table(tables: TableSet, device: torch.device, trainers: Channel | None, rows: int) -> SlotTable:
    """So many slots; ``trainers``: the channel between several, None for one."""
    if trainers is None:
        return FusedTable(tables, rows, device)
    return SharedTable(tables, rows, device, trainers)
