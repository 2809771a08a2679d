"""``TieredEmbeddingBagCollection``: tables larger than device memory, exact under every cache policy.

A row is in one of three places: a **resident** slot (a TBE of ``slots`` rows), the **slab** (a second TBE for
rows that one batch alone needs) or the **cold store**. It moves with its optimizer state, so each update is
the one that a single big table would have made.

A batch passes through these calls, in this order (``forward`` makes all of them):

    find    ids -> distinct rows                         a GPU, one batch further ahead (``on_gpu``)
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
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.common.plain_attributes import PlainAttributes
from recpipe.distributed.ranks import Channel, Ranks
from recpipe.plugin.bags import IndexBags, RowIds
from recpipe.plugin.calls import Owned
from recpipe.plugin.collection import TierFigures, TierTimes
from recpipe.plugin.policy import Cache, CachePolicy
from recpipe.plugin.skipper import RowFilter
from recpipe.plugin.store import ColdStore, IoCounters, Records
from recpipe.plugin.tables import Region, TableSet, Values
from recpipe.tables.capabilities import Planned, SavesPlacement, ShowsRows
from recpipe.tables.collection import RowCollection
from recpipe.tables.repeated import RepeatedLookup
from recpipe.tables.rowtable import looked_up
from recpipe.tables.tiers import saved_placement
from recpipe.tables.tiers.memory import TierMemory
from recpipe.tables.tiers.on_gpu import Finder, GpuBags
from recpipe.tables.tiers.placement import TierPlan, TierPlanner, table_bags
from recpipe.tables.tiers.policies import policy_bytes
from recpipe.tables.tiers.store_thread import StoreThread


class TieredEmbeddingBagCollection(PlainAttributes, RowCollection, Planned, SavesPlacement, ShowsRows):
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
        self.store = store
        self.device = device
        self.prefetches = prefetch
        self._spread = policy.space.spread
        self.planner = TierPlanner(policy, prefetch, tables.pooled, owner)
        self.times = TierTimes()
        self.ranks = ranks or Ranks()
        trainers = trainers if len(self.ranks.trainers) > 1 else None
        self.replicated = trainers is not None
        self.cold = StoreThread(store, device, self.times, self.ranks)
        finds = device.type == "cuda" and not self.replicated
        self._finder = Finder(tables, self.cold.transfer, self._spread) if finds else None
        self._planning = threading.RLock()
        self.slots = policy.space.slots
        self.memory = TierMemory(tables, self.slots, slab_rows, self.cold, device, trainers)
        self._looked_up = self._hits = 0

    # -- the calls ----------------------------------------------------------------------

    def bags(self, sparse: KeyedJaggedTensor) -> IndexBags:
        """The batch's lookups as rows, with features in the tables' order, independent of that in
        ``sparse``."""
        return table_bags(self.tables, sparse, self._spread)

    @property
    def finds_ahead(self) -> bool:  # type: ignore[override]
        """As ``Planned``."""
        return self._finder is not None

    def find(self, sparse: KeyedJaggedTensor) -> GpuBags | None:
        """The batch's lookups, of which a GPU has found the distinct rows."""
        return None if self._finder is None else self._finder.bags(sparse)

    def plan(self, sparse: KeyedJaggedTensor, found: GpuBags | None = None) -> TierPlan:
        """Decide where the batch's lookups go and which rows move; ``advance`` must follow."""
        with self._planning:
            start = perf_counter()
            found = self.find(sparse) if found is None else found
            plan = self.planner.plan(self.bags(sparse) if found is None else found)
            self.times.plan += perf_counter() - start
        return plan

    def prefetch(self, plan: TierPlan) -> None:
        """Start fetching the plan's rows, once ``advance`` of the batch before it has been called. A GPU also
        gets the numbers of the slots and slab rows to look up."""
        self.memory.fetch(plan)

    def forget(self) -> None:
        """Undo a plan whose batch will not be trained because the epoch was left early."""
        with self._planning:
            self.planner.undo()

    def begin(self, plan: TierPlan) -> None:
        """As ``Planned``."""
        with self._planning:
            self.planner.commit()
        plan.begun = True

    def advance(self, plan: TierPlan) -> None:
        """After the last batch's update: send departing rows away; start the fetch if it is not started."""
        self.arrive()  # a batch that was skipped still has its rows
        start = perf_counter()
        self.cold.check_writes()
        if not plan.begun:
            self.begin(plan)
        self.memory.advance(plan)
        self._looked_up += plan.looked_up
        self._hits += plan.hits
        self.times.advance += perf_counter() - start

    def arrive(self) -> None:
        """Wait for the batch's rows, if they have not arrived, and put them into their slots and the slab."""
        self.memory.arrive()

    # -- lookups -----------------------------------------------------------------------------

    def lookup_resident(self, plan: TierPlan) -> torch.Tensor:
        """As ``TierMemory``."""
        return self.memory.lookup_resident(plan)

    def lookup_slab(self, plan: TierPlan) -> torch.Tensor:
        """As ``TierMemory``."""
        return self.memory.lookup_slab(plan)

    def lookup_both(self, plan: TierPlan) -> torch.Tensor | None:
        """As ``TierMemory``."""
        return self.memory.lookup_both(plan)

    def repeated(self, plan: TierPlan) -> RepeatedLookup | None:
        """As ``TierMemory``."""
        return self.memory.repeated(plan)

    def lookup(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        """Make all calls and look up ``sparse``; in eval mode nothing is planned or moved."""
        if not self.training or not torch.is_grad_enabled():
            return self.read_now(sparse)
        return self.lookup_to_train(sparse)

    def lookup_to_train(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        """Make all calls and look up; the result's backward pass must come before the next calls."""
        assert not self.replicated, "several trainers plan whole batches: see pipeline.loader"
        return self.lookup_planned(self.plan(sparse))

    def lookup_planned(self, plan: TierPlan) -> torch.Tensor:
        """As ``lookup_to_train``, of what has been planned, and perhaps fetched, already."""
        self.advance(plan)
        self.arrive()
        return self.lookup_arrived(plan)

    def lookup_arrived(self, plan: TierPlan) -> torch.Tensor:
        """The last of these calls: look up all rows, which have arrived."""
        both = self.lookup_both(plan)
        if both is not None:
            return both
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
        self.memory.filter_updates(rows)

    # -- rows as they are between two batches ------------------------------------------------

    @contextmanager
    def quiesced(self) -> Iterator[None]:
        """In the block, every row is in its slot or in the store, as the last trained batch left it."""
        with self._planning:
            planned = self.planner.undo()
            self.memory.settle()
            try:
                yield
            finally:
                if planned is not None:
                    self.planner.plan(planned)

    @property
    def resident_count(self) -> int:
        """How many rows are in slots."""
        return self.memory.occupied.count

    def resident_rows(self) -> RowIds:
        """Rows that are in slots after the last trained batch, sorted, int64 [n]."""
        return self.memory.occupied.resident()

    def resident_weights(self, rows: RowIds) -> torch.Tensor:
        """A copy of the weights of distinct resident ``rows``, float32 [n, D]."""
        self.arrive()  # a batch that was skipped still has its rows
        return self.memory.weights_of(rows)

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
        return self.memory.read(rows, self.planner.where[rows])

    def write_rows(self, rows: RowIds, records: Records) -> None:
        """Replace the records of distinct global ``rows`` (inside ``quiesced``)."""
        self.memory.write(rows, records, self.planner.where[rows])

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
        """Assign the saved resident rows to their slots; rows that were resident before are forgotten.

        The slots get the rows that the store has, and what was saved of them if the store rounds. Tables that
        were not made with the saved rows are loaded afterwards.

        False if the checkpoint is from a run with another policy or budget. Training then continues exactly,
        but no row is resident at first.
        """
        planner = self.planner
        if state is None or not saved_placement.same_place(planner, state):
            return False
        with self.quiesced():
            self.memory.fill_slots(state["row_of_slot"])
            saved_placement.restore(planner, state)
            if self.store.rounded is not None and not self.tables.optimizer.frozen:
                self._restore_bits()
        return True

    def _restore_bits(self) -> None:
        """Replace resident rows by what was saved of them (inside ``quiesced``)."""
        saved = {table.name for table in self.tables.tables if table.saved is not None}
        resident = self.resident_rows()
        for region in self.regions():
            here = self.rows_of(region)
            rows = resident[slice(*np.searchsorted(resident, (here[0], here[-1] + 1)))]
            if region.table in saved and len(rows):
                records = self.tables.fill(region.table, region.start, region.stop)
                self.write_rows(rows, records[rows - here[0]])

    # -- the rest ----------------------------------------------------------------------------

    @property
    def io(self) -> IoCounters:
        """What training moved, without evaluation and checkpoints (``store.io`` has everything)."""
        return self.cold.counters.plus(self.store.background())

    @property
    def resident_bytes(self) -> int:
        """Device memory of resident rows and their optimizer state."""
        return self.planner.space.slots * self.tables.record_bytes

    @property
    def overhead_bytes(self) -> int:
        """Memory beyond the resident rows: row maps, the policy's tables, the slab, the store's buffers."""
        return (
            self.planner.overhead_bytes
            + self.memory.occupied.rows.nbytes
            + policy_bytes(self.planner.policy)
            + self.memory.slab_bytes
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
            self.memory.occupied.cold_start,
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
            self.memory.close()
            self._spread.close()
            self.cold.close()
