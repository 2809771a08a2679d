"""``TieredEmbeddingBagCollection``: tables larger than device memory, exact under every cache policy.

Sum pooling is linear: pooled(all ids) = pooled(resident ids) + pooled(slab ids).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.plugin.bags import RowIds
from recpipe.plugin.collection import TierFigures
from recpipe.plugin.policy import IN_STORE
from recpipe.plugin.store import IoCounters, Records
from recpipe.tables.collection import SavesPlacement, ShowsRows
from recpipe.tables.rows import looked_up, table_bags
from recpipe.tables.tiers import saved_placement
from recpipe.tables.tiers.engine import TieredRows, TierEngine
from recpipe.tables.tiers.policies import policy_bytes


class TieredEmbeddingBagCollection(TierEngine, SavesPlacement, ShowsRows):
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
        distinct, which = np.unique(bags.indices, return_inverse=True)
        weights = self.records_of(distinct)[:, : self.tables.dim]
        return looked_up(self.tables, weights, which, bags)

    # -- rows as they are between two batches ------------------------------------------------

    @property
    def resident_count(self) -> int:
        """How many rows are in slots."""
        return self.occupied.count

    def resident_rows(self) -> RowIds:
        """Rows that are in slots after the last trained batch, sorted, int64 [n]."""
        return self.occupied.resident()

    def resident_weights(self, rows: RowIds) -> torch.Tensor:
        """A copy of the weights of distinct resident ``rows``, float32 [n, D]."""
        self.wait()  # a batch that was skipped still has its rows
        slots = self._index(self.occupied.slots_of(rows))
        return self.layout.resident.take(slots)[:, : self.tables.dim]

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
        if len(self._ahead):
            self._rewritten.append(np.intersect1d(rows[cold], self._ahead))

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
            self._fill_slots(state["row_of_slot"])
            saved_placement.restore(planner, state)
            if self.store.rounded is not None and not self.tables.optimizer.frozen:
                self._restore_bits()
        return True

    def _fill_slots(self, row_of_slot: RowIds) -> None:
        """Put these rows of the store into the slots (int64 [slots], -1 for an empty one)."""
        used = np.flatnonzero(row_of_slot >= 0)
        for part in np.array_split(used, max(1, len(used) // 65_536)):
            self.layout.resident.put(self._index(part), self.cold.fetch_now(row_of_slot[part]))
        self.occupied.restore(row_of_slot)

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
            + self.occupied.rows.nbytes
            + policy_bytes(self.planner.policy)
            + self.layout.slab_bytes
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
            self.occupied.cold_start,
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
            self.cold.transfer.let_go(self._used)
            self._used = []
            self._spread.close()
            self.cold.close()
