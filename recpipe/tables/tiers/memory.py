"""Where the rows of tiers are: in resident slots, in the slab, or in the cold store behind them.

The planner decides what moves (``placement``); this moves it, in the training thread, and reads and replaces
rows between two batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from recpipe.common.spread import Spread
from recpipe.distributed.ranks import Channel
from recpipe.plugin.policy import IN_STORE, RowIds, Slots
from recpipe.tables.rowtable import RowBags
from recpipe.tables.skipping import RowFilter
from recpipe.tables.specs import TableSet
from recpipe.tables.stores.base import Records
from recpipe.tables.tiers.moves import Moves
from recpipe.tables.tiers.occupied import Occupied
from recpipe.tables.tiers.on_gpu import GpuLookups
from recpipe.tables.tiers.parting import DeviceBags
from recpipe.tables.tiers.placement import TierPlan
from recpipe.tables.tiers.slots import Table, filter_slots, make_slots, put, take
from recpipe.tables.tiers.store_thread import StoreThread


@dataclass(frozen=True)
class _Arriving:
    """A batch that ``advance`` has begun, until its rows are in their places."""

    plan: TierPlan
    carried: torch.Tensor
    """Records of the rows that stay in the slab."""
    places: list[torch.Tensor]
    """The last three of ``Moves.positions``."""


class TierMemory(nn.Module):
    """Resident slots and a slab on ``device``, in front of the store of ``cold``.

    ``slots`` and ``slab_rows``: for how many rows they have room; the slab grows. ``trainers``: the channel
    between several trainers, each of which has a replica; None for one. ``spread``: threads for copies.
    """

    def __init__(
        self,
        tables: TableSet,
        slots: int,
        slab_rows: int,
        cold: StoreThread,
        device: torch.device,
        trainers: Channel | None,
        spread: Spread,
    ) -> None:
        super().__init__()
        self.tables, self.cold, self.device, self.trainers = tables, cold, device, trainers
        self.spread = spread
        self.resident = make_slots(tables, max(1, slots), device, trainers)
        self.slab = make_slots(tables, slab_rows, device, trainers)
        self.occupied = Occupied(slots)
        self.slab_rows: RowIds = np.empty(0, np.int64)
        """The rows in the slab's first places, int64 [S]."""
        self.arriving: _Arriving | None = None
        self._slab_written = True
        """Whether the store has the slab's rows as they are."""
        self._row_filter: RowFilter | None = None
        self._ahead: RowIds = np.empty(0, np.int64)
        """The rows of the latest fetch."""
        self._rewritten: list[RowIds] = []
        """Rows that were replaced in the store since a batch's rows last arrived."""

    # -- a batch's moves ---------------------------------------------------------------------

    def fetch(self, plan: TierPlan) -> None:
        """Start fetching the plan's rows, and begin to make what will be looked up on a GPU."""
        self._ahead = plan.fetch
        plan.fetched = self.cold.fetch(self._ahead)
        if isinstance(plan.lookups, GpuLookups):
            plan.lookups.prepare()

    def advance(self, plan: TierPlan) -> None:
        """After the last batch's update and ``arrive``: send departing rows away, and put carried ones that
        get a slot there at once; start the fetch if it is not started."""
        moves = Moves.of(plan, self.slab_rows, self._slab_written)
        vacated, carried, leaving, promoted, *places = self.cold.transfer.send(moves.positions).use()
        departing = torch.cat((self.slab_records(), take(self.resident, vacated)))
        carried_records = self.cold.as_stored(departing[carried])
        self.cold.write(moves.written, departing if moves.all_leave else departing[leaving])
        if plan.fetched is None:
            self.fetch(plan)
        self.slab_rows, self._slab_written = plan.slab, True
        self.occupied.carry_out(plan)
        put(self.resident, promoted, carried_records[: len(promoted)])
        self.arriving = _Arriving(plan, carried_records[len(promoted) :], places)

    def arrive(self) -> None:
        """Wait for the batch's rows, if they have not arrived, and put them into their slots and the slab."""
        if self.arriving is None:
            return
        arriving, self.arriving = self.arriving, None
        plan, (slots, fetched_places, carried_places) = arriving.plan, arriving.places
        start = perf_counter()
        assert plan.fetched is not None, "advance has started the fetch"
        fetched = self._not_stale(plan.fetch, plan.fetched.result().use())
        plan.fetched = None
        self.cold.times.wait += perf_counter() - start
        put(self.resident, slots, fetched[: len(slots)])
        self.reserve_slab(len(plan.slab))
        put(self.slab, fetched_places, fetched[len(slots) :])
        put(self.slab, carried_places, arriving.carried)
        self._slab_written = False

    def slab_changes(self, _gradient: torch.Tensor) -> None:
        """Note that the slab will change, so that an earlier write-back of it is not the last one."""
        self._slab_written = False

    def settle(self) -> None:
        """Let a batch's rows arrive, and the store have the slab's: each row is then in its slot or in the
        store."""
        self.arrive()
        if not self._slab_written:
            self.cold.write(self.slab_rows, self.slab_records())
            self._slab_written = True

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
        return self._lookup(self.resident, plan.lookups.tiers()[0])

    def lookup_slab(self, plan: TierPlan) -> torch.Tensor:
        """Pooled slab rows of samples ``plan.cold_first ..``, float32 [B - cold_first, F * D].

        Without pooling, rows float32 [L, D], zero for resident rows.
        """
        if plan.shared is not None:
            rows = self._shared_lookup(self.slab, *plan.shared.slab)
        else:
            rows = self._lookup(self.slab, plan.lookups.tiers()[1])
        if rows.requires_grad:
            rows.register_hook(self.slab_changes)  # type: ignore[no-untyped-call]
        return rows

    def _lookup(self, table: Table, bags: DeviceBags) -> torch.Tensor:
        rows: torch.Tensor = table(*bags)
        return rows

    def _shared_lookup(self, table: Table, bags: RowBags, touched: RowIds) -> torch.Tensor:
        pooled: torch.Tensor = table(bags, touched)
        return pooled

    # -- rows between two batches ------------------------------------------------------------

    def weights_of(self, rows: RowIds) -> torch.Tensor:
        """A copy of the weights of distinct resident ``rows``, float32 [n, D]."""
        return take(self.resident, self._index(self.occupied.slots_of(rows)))[:, : self.tables.dim]

    def read(self, rows: RowIds, where: Slots) -> torch.Tensor:
        """Records of distinct ``rows``, each in slot ``where`` or, below 0, in the store: float32 [n, width]
        on the device."""
        cold = np.flatnonzero(where < 0)
        fetched = self.cold.fetch_now(rows[cold])
        if len(cold) == len(rows):
            return fetched
        hot = np.flatnonzero(where >= 0)
        records = torch.empty((len(rows), self.tables.layout.width), device=self.device)
        records[self._index(cold)] = fetched
        records[self._index(hot)] = take(self.resident, self._index(where[hot]))
        return records

    def write(self, rows: RowIds, records: Records, where: Slots) -> None:
        """Replace the records of distinct ``rows``, each in slot ``where`` or, below 0, in the store, and
        below ``IN_STORE`` in the slab, too."""
        hot, cold = np.flatnonzero(where >= 0), np.flatnonzero(where < 0)
        put(self.resident, self._index(where[hot]), torch.from_numpy(records[hot]).to(self.device))
        # The next batch may take a row from the slab instead of the store.
        held = np.flatnonzero(where < IN_STORE)
        positions = torch.from_numpy(-2 - where[held].astype(np.int64)).to(self.device)
        put(self.slab, positions, torch.from_numpy(records[held]).to(self.device))
        self.cold.write_now(rows[cold], records[cold])
        if len(self._ahead):
            self._rewritten.append(np.intersect1d(rows[cold], self._ahead))

    def fill_slots(self, row_of_slot: RowIds) -> None:
        """Put these rows of the store into the slots (int64 [slots], -1 for an empty one)."""
        used = np.flatnonzero(row_of_slot >= 0)
        for part in np.array_split(used, max(1, len(used) // 65_536)):
            put(self.resident, self._index(part), self.cold.fetch_now(row_of_slot[part]))
        self.occupied.restore(row_of_slot)

    # -- slots and slab ----------------------------------------------------------------------

    def filter_updates(self, rows: RowFilter) -> None:
        """Leave rows out of both tiers' updates."""
        self._row_filter = rows
        filter_slots(self.resident, rows, lambda slots: self.occupied.rows[slots], self.tables)
        self._filter_slab(rows)

    def _filter_slab(self, rows: RowFilter) -> None:
        filter_slots(self.slab, rows, lambda slots: self.slab_rows[slots], self.tables)

    def slab_records(self) -> torch.Tensor:
        """A copy of the records in the slab, float32 [S, width]."""
        return take(self.slab, torch.arange(len(self.slab_rows), device=self.device))

    def reserve_slab(self, rows: int) -> None:
        """Make room for ``rows`` slab rows; ``advance`` has taken out what it held."""
        if rows > len(self.slab.weights):
            self.slab = make_slots(self.tables, 1 << (rows - 1).bit_length(), self.device, self.trainers)
            if self._row_filter is not None:
                self._filter_slab(self._row_filter)

    @property
    def slab_bytes(self) -> int:
        """Memory of the slab."""
        return sum(part.numel() * 4 for part in (self.slab.weights, self.slab.state))
