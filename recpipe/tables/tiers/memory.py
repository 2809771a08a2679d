"""Where the rows of tiers are: in resident slots, in the slab, or in the cold store behind them.

The planner decides what moves (``placement``); this moves it, in the training thread, and reads and replaces
rows between two batches.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.common.device import given_so_far
from recpipe.common.plain_attributes import PlainAttributes
from recpipe.distributed.ranks import Channel
from recpipe.plugin.bags import RowIds, Slots
from recpipe.plugin.policy import IN_STORE
from recpipe.plugin.skipper import RowFilter
from recpipe.plugin.store import Records
from recpipe.plugin.tables import TableSet
from recpipe.tables.repeated import RepeatedLookup
from recpipe.tables.rowtable import RowBags
from recpipe.tables.tiers.moves import Moves
from recpipe.tables.tiers.occupied import Occupied
from recpipe.tables.tiers.on_gpu import GpuLookups
from recpipe.tables.tiers.parting import DeviceBags
from recpipe.tables.tiers.placement import TierPlan
from recpipe.tables.tiers.slots import Room, filter_slots, make_slots, put, take
from recpipe.tables.tiers.store_thread import StoreThread
from recpipe.tables.tiers.transfer import Landed, Sent


@dataclass(frozen=True)
class _Arriving:
    """A batch that ``advance`` has begun, until its rows are in their places."""

    plan: TierPlan
    moves: Moves
    carried: torch.Tensor
    """Records of rows that stay on the device, without those that have been put into their slots."""
    targets: torch.Tensor
    """Places of the fetched rows, then of these."""


class TierMemory(PlainAttributes):
    """Resident slots and a slab on ``device``, in front of the store of ``cold``.

    On a GPU both are in one table, so that a batch is looked up and updated at once, by one TBE. A slab that
    becomes too small gets a table of its own there, as it has on a CPU, where its size changes often.

    ``slots`` and ``slab_rows``: for how many rows they have room; the slab grows. ``trainers``: the channel
    between several trainers, each of which has a replica; None for one.
    """

    def __init__(
        self,
        tables: TableSet,
        slots: int,
        slab_rows: int,
        cold: StoreThread,
        device: torch.device,
        trainers: Channel | None,
    ) -> None:
        super().__init__()
        self.tables, self.cold, self.device, self.trainers = tables, cold, device, trainers
        self.frozen = tables.optimizer.frozen
        """Whether the store always has every row as it is, so that none is written back."""
        self.together = device.type == "cuda" and trainers is None
        """Whether slots and slab are in one table."""
        size = max(1, slots)
        self.table = make_slots(tables, size + slab_rows * self.together, device, trainers)
        self.slab_table = None if self.together else make_slots(tables, slab_rows, device, trainers)
        """The slab's own table; None while it is in ``table``, behind the slots."""
        if self.slab_table is None:
            self.whole, self.resident, self.slab = Room.parts(self.table, size)
        else:
            self.resident, self.slab = Room.of(self.table), Room.of(self.slab_table)
        self.occupied = Occupied(slots)
        self.slab_rows: RowIds = np.empty(0, np.int64)
        """The rows in the slab's first places, int64 [S]."""
        self.arriving: _Arriving | None = None
        self._slab_written = True
        """Whether the store has the slab's rows as they are."""
        self._row_filter: RowFilter | None = None
        self._ahead: RowIds = np.empty(0, np.int64)
        """The rows of the latest fetch."""
        self._used: list[torch.Tensor] = []
        """What the latest batch's moves and lookups have come in from other streams. It is kept until the
        batch after it begins, since to hand each tensor over to the training's stream would take longer."""
        self._rewritten: list[RowIds] = []
        """Rows that were replaced in the store since a batch's rows last arrived."""

    # -- a batch's moves ---------------------------------------------------------------------

    def fetch(self, plan: TierPlan) -> None:
        """Start fetching the plan's rows, and begin to make what will be looked up on a GPU.

        Called for a batch while the one before it trains, this finds out how its rows will move, too.
        """
        self._ahead = plan.fetch
        plan.fetched = self.cold.fetch(self._ahead)
        at_once = self._at_once(plan)
        if plan.moves is None and at_once:
            assert isinstance(plan.lookups, GpuLookups), "on a GPU"
            moves = self._moves(plan, slab_written=False)
            plan.moves = moves, plan.lookups.prepare(self.slab.first, at_once, moves.positions)
            return
        if plan.moves is None:
            plan.moves = self._sent(self._moves(plan, slab_written=False))
        if isinstance(plan.lookups, GpuLookups):
            plan.lookups.prepare(self.slab.first, at_once)

    def advance(self, plan: TierPlan) -> None:
        """After the last batch's update and ``arrive``: send departing rows away, and put carried ones that
        get a slot there, which may be looked up before ``arrive``; start the fetch if it is not started.

        Where both tiers are looked up at once, slab rows among them, that is after ``arrive``, which then
        puts all of them in their places together.
        """
        written_since = self._slab_written and not self.frozen
        if plan.moves is None or written_since or plan.moves[0].slab_first != self.slab.first:
            plan.moves = self._sent(self._moves(plan, self._slab_written))
        moves, sent = plan.moves
        *places, targets = sent.use(kept=True)
        leaving, carried = self._departing(moves, *places)
        self.cold.write(moves.written, leaving, self._used)
        self._used = [targets]
        carried = carried if self.frozen else self.cold.as_stored(carried)
        if plan.fetched is None:
            self.fetch(plan)
        self.slab_rows, self._slab_written = plan.slab, True
        self.occupied.carry_out(plan)
        self.reserve_slab(len(plan.slab))
        if moves.promoted and not (self._at_once(plan) and len(plan.slab)):
            fetched, promoted, others = targets.tensor_split((moves.fetched, moves.fetched + moves.promoted))
            put(self.resident, promoted, carried[: moves.promoted])
            targets, carried = torch.cat((fetched, others)), carried[moves.promoted :]
        self.arriving = _Arriving(plan, moves, carried, targets)

    def _moves(self, plan: TierPlan, slab_written: bool) -> Moves:
        """The plan's moves after those of the batch before it."""
        return Moves.of(plan, self.slab_rows, slab_written, self.slab.first, self.together, self.frozen)

    def _sent(self, moves: Moves) -> tuple[Moves, Sent]:
        """``moves``, on the way to the device."""
        return moves, self.cold.transfer.send(*moves.positions)

    def _departing(
        self, moves: Moves, places: torch.Tensor, leaving: torch.Tensor, carried: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the records to write and of those that stay on the device; ``places`` and the others are
        arrays of ``moves``."""
        if moves.together:
            return take(self.whole, places).tensor_split((len(moves.written),))  # type: ignore[return-value]
        slab, slots = places.tensor_split((moves.in_slab,))
        records = torch.cat((take(self.slab, slab), take(self.resident, slots)))
        leave = records if moves.all_leave else records.index_select(0, leaving)
        return leave, records.index_select(0, carried)

    def arrive(self) -> None:
        """Wait for the batch's rows, if they have not arrived, and put them into their slots and the slab."""
        if self.arriving is None:
            return
        arriving, self.arriving = self.arriving, None
        plan, moves = arriving.plan, arriving.moves
        assert plan.fetched is not None, "advance has started the fetch"
        fetched = self._not_stale(plan.fetch, self._awaited(plan.fetched).use(kept=True))
        self._used.append(fetched)
        plan.fetched = plan.moves = None
        targets, carried = arriving.targets, arriving.carried
        if self.together:
            put(self.whole, targets, torch.cat((fetched, carried)) if len(carried) else fetched)
        else:
            slots, in_slab, carried_to = targets.tensor_split((moves.to_slots, moves.fetched))
            put(self.resident, slots, fetched[: moves.to_slots])
            # The slab may have got a table of its own since.
            put(self.slab, in_slab - moves.slab_first, fetched[moves.to_slots :])
            put(self.slab, carried_to - moves.slab_first, carried)
        self._slab_written = self.frozen

    def _awaited(self, fetched: Future[Landed]) -> Landed:
        """The fetched records. A wait counts if the device has nothing left to do by its end: a GPU that is
        still training the batch before has lost no time."""
        if fetched.done():
            return fetched.result()
        has_done, start = given_so_far(self.device), perf_counter()
        landed = fetched.result()
        if has_done():
            self.cold.times.wait += perf_counter() - start
        return landed

    def slab_changes(self, _gradient: torch.Tensor) -> None:
        """Note that the slab will change, so that an earlier write-back of it is not the last one."""
        self._slab_written = self.frozen

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
        return self.cold.transfer.send(positions).use()[0]

    def close(self) -> None:
        """Let go of what came from other streams."""
        self.cold.transfer.let_go(self._used)
        self._used = []

    # -- lookups -----------------------------------------------------------------------------

    def lookup_resident(self, plan: TierPlan) -> torch.Tensor:
        """Pooled resident rows of all samples, float32 [B, F * D]; its backward updates them.

        Without pooling, rows float32 [L, D], zero for rows in the slab.
        """
        if plan.shared is not None:
            return self._shared_lookup(self.resident, *plan.shared.resident)
        all_rows = None if len(plan.slab) else self.lookup_both(plan)
        if all_rows is not None:
            return all_rows
        resident, _ = self._kept(*plan.lookups.tiers(self.slab.first))
        return self._lookup(self.resident, resident)

    def lookup_slab(self, plan: TierPlan) -> torch.Tensor:
        """Pooled slab rows of samples ``plan.cold_first ..``, float32 [B - cold_first, F * D].

        Without pooling, rows float32 [L, D], zero for resident rows.
        """
        if plan.shared is not None:
            rows = self._shared_lookup(self.slab, *plan.shared.slab)
        else:
            _, slab = self._kept(*plan.lookups.tiers(self.slab.first))
            rows = self._lookup(self.slab, slab)
        return self._noting_changes(rows)

    def lookup_both(self, plan: TierPlan) -> torch.Tensor | None:
        """The rows of all samples, as the sum of the two others; None if they are not looked up at once."""
        if not self._at_once(plan):
            return None
        assert isinstance(plan.lookups, GpuLookups), "on a GPU"
        (bags,) = self._kept(plan.lookups.both(self.slab.first))
        rows = self._lookup(self.slab, bags)
        return self._noting_changes(rows) if len(plan.slab) else rows

    def repeated(self, plan: TierPlan) -> RepeatedLookup | None:
        """``lookup_both``, once the rows have arrived, for a graph of kernels; None: it is no lookup of one
        id in each bag, or something chooses among the rows to update."""
        lookups = plan.lookups
        if not self._at_once(plan) or self._row_filter is not None:
            return None
        assert isinstance(lookups, GpuLookups), "on a GPU"
        if not lookups.given.one_each or lookups.given.weights is not None:
            return None
        ((indices, offsets, _),) = self._kept(lookups.both(self.slab.first))
        dim, features = self.tables.dim, len(self.tables.features)
        shape = (plan.batch_size, features * dim) if self.tables.pooled else (len(indices), dim)
        return RepeatedLookup(self.table, indices, offsets, shape, self.table.weights.data_ptr())

    def _kept(self, *bags: DeviceBags) -> tuple[DeviceBags, ...]:
        """``bags``, which are kept until the batch after theirs begins."""
        self._used += [part for each in bags for part in each if part is not None]
        return bags

    def _at_once(self, plan: TierPlan) -> bool:
        """Whether both tiers are looked up at once: those of a batch that is cut are not."""
        return self.together and isinstance(plan.lookups, GpuLookups) and plan.lookups.order is None

    def _noting_changes(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.requires_grad:
            rows.register_hook(self.slab_changes)  # type: ignore[no-untyped-call]
        return rows

    def _lookup(self, room: Room, bags: DeviceBags) -> torch.Tensor:
        rows: torch.Tensor = room.table(*bags)
        return rows

    def _shared_lookup(self, room: Room, bags: RowBags, touched: RowIds) -> torch.Tensor:
        pooled: torch.Tensor = room.table(bags, touched)
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
        below ``IN_STORE`` in the slab, too. The store gets all of those that are never written back."""
        hot, cold = np.flatnonzero(where >= 0), np.flatnonzero(where < 0)
        if self.frozen:
            cold = np.arange(len(rows))
            records = self.cold.as_stored(torch.from_numpy(records)).numpy()
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
        filter_slots(self.table, rows, self._rows_in_table, self.tables)
        self._filter_slab()

    def _filter_slab(self) -> None:
        if self.slab_table is not None and self._row_filter is not None:
            filter_slots(
                self.slab_table, self._row_filter, lambda places: self.slab_rows[places], self.tables
            )

    def _rows_in_table(self, places: RowIds) -> RowIds:
        """The rows in these places of the table that has the slots."""
        if not self.together:
            return self.occupied.rows[places]
        in_slab = places >= self.slab.first
        rows = np.empty(len(places), np.int64)
        rows[~in_slab] = self.occupied.rows[places[~in_slab]]
        rows[in_slab] = self.slab_rows[places[in_slab] - self.slab.first]
        return rows

    def slab_records(self) -> torch.Tensor:
        """A copy of the records in the slab, float32 [S, width]."""
        return take(self.slab, torch.arange(len(self.slab_rows), device=self.device))

    def reserve_slab(self, rows: int) -> None:
        """Make room for ``rows`` slab rows; ``advance`` has taken out what it held."""
        if rows > len(self.slab.weights):
            size = 1 << (rows - 1).bit_length()
            self.slab_table, self.together = make_slots(self.tables, size, self.device, self.trainers), False
            self.slab = Room.of(self.slab_table)
            self._filter_slab()

    @property
    def slab_bytes(self) -> int:
        """Memory of the slab."""
        return sum(part.numel() * 4 for part in (self.slab.weights, self.slab.state))
