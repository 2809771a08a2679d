"""Rows in tiers as they are between two batches: read and replaced, for checkpoints, exports and plugins, and
which of them are resident."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.plugin.bags import RowIds
from recpipe.plugin.residents import in_slab
from recpipe.plugin.store import ColdStore, Records
from recpipe.tables.collection import RowCollection, SavesPlacement, ShowsRows
from recpipe.tables.tiers.layout import Layout
from recpipe.tables.tiers.plan import Occupied
from recpipe.tables.tiers.planner import TierPlanner
from recpipe.tables.tiers.transfer import StoreThread


@dataclass
class InStore:
    """How rows on the device and on their way differ from those in the store."""

    slab_written: bool = True
    """Whether the store has the slab's rows as they are."""
    ahead: RowIds = field(default_factory=lambda: np.empty(0, np.int64))
    """The rows of the latest fetch."""
    rewritten: list[RowIds] = field(default_factory=list)
    """Rows that were replaced in the store since a batch's rows last arrived."""


class BetweenBatches(RowCollection, SavesPlacement, ShowsRows):
    """What of ``TieredEmbeddingBagCollection`` takes no part in a step."""

    store: ColdStore
    device: torch.device
    frozen: bool
    """Whether the store always has every row as it is, so that none is written back."""
    planner: TierPlanner
    cold: StoreThread
    occupied: Occupied
    layout: Layout
    now: InStore
    _planning: threading.RLock

    @abstractmethod
    def wait(self) -> None:
        """Wait until the rows of the batch that has advanced are in their places."""

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
        held = np.flatnonzero(in_slab(where))
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

    def write_back(self) -> None:
        """Write the slab's rows, and wait for the store; residents are in their tier."""
        with self.quiesced():
            self.cold.flush()

    def _index(self, positions: NDArray[np.integer[Any]]) -> torch.Tensor:
        """Positions as torch needs them: int64 on the device."""
        return self.cold.transfer.send(positions).use()[0]
