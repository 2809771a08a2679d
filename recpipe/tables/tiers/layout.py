"""Where rows on the device are: in resident slots, or in the slab, which has rows that one batch alone needs.

A layout moves rows in and out of places and looks them up. It knows no policy and no store: ``tiered`` does.
A GPU has slots and slab in one table, so that a batch is looked up and updated at once, by one TBE, and rows
move by one copy of positions. They are in two tables on a CPU, where the slab's size changes often; for
several trainers, each of which has replicas; and on a GPU once a slab has outgrown the one table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from recpipe import private_api
from recpipe.distributed.ranks import Channel
from recpipe.plugin.bags import RowIds
from recpipe.plugin.skipper import RowFilter
from recpipe.plugin.tables import TableSet
from recpipe.tables.collection import make_tbe
from recpipe.tables.group_rows import GraphLookup
from recpipe.tables.rows import RowBags, updated
from recpipe.tables.skipping import FilteredLookups
from recpipe.tables.tiers.gpu_lookups import GpuLookups
from recpipe.tables.tiers.lookups import Lookups, Touched
from recpipe.tables.tiers.plan import Moves, Occupied, TierPlan, moves_of
from recpipe.tables.tiers.transfer import Sent, Transfer


class FusedTable(nn.Module):
    """``rows`` slots for rows of any table of a group, in a fused TBE, whose backward pass makes the update.
    Several trainers have a ``SharedTable`` in its place."""

    def __init__(self, tables: TableSet, rows: int, device: torch.device) -> None:
        super().__init__()
        self.tbe = make_tbe(tables, rows, device)
        self.weights, self.state = private_api.tbe_views(self.tbe)[0]
        """[rows, D], in their storage type, and optimizer state float32 [rows, S]: the TBE's memory."""
        self._features = len(tables.features) if tables.pooled else 1

    def forward(self, *bags: torch.Tensor | None) -> torch.Tensor:
        """Rows of indices, offsets and weights, pooled by the TBE."""
        pooled: torch.Tensor = self.tbe(*bags)
        return pooled

    def filter_updates(self, rows: RowFilter, rows_in: Callable[[RowIds], RowIds]) -> None:
        """From now on update only the rows that ``rows`` keeps; ``rows_in`` tells which rows are in slots."""
        self.tbe.forward = FilteredLookups(
            self.tbe, rows, lambda slots, _: rows_in(slots), self._features, pooled=True
        )


class SharedTable(nn.Module):
    """``rows`` slots of which every trainer holds a replica, with weights float32 [rows, D] and optimizer
    state [rows, S]. It replaces a fused TBE: the backward pass makes the update.

    Each trainer looks up and differentiates its own samples. A row's gradients are added over the trainers in
    order, and all trainers apply the same update to the same bits, so that replicas never differ.
    """

    def __init__(self, tables: TableSet, rows: int, device: torch.device, channel: Channel) -> None:
        super().__init__()
        self.optimizer = tables.optimizer
        self.channel = channel
        self.weights = torch.zeros((rows, tables.dim), device=device)
        self.state = torch.zeros((rows, tables.layout.width - tables.dim), device=device)
        self.stay: Callable[[Touched, torch.Tensor], torch.Tensor | None] | None = None
        """Returns which of the touched slots to update from gradients float32 [U, D], as bool [U]; None:
        all."""
        self._anchor = torch.zeros(0, device=device, requires_grad=True)

    def forward(self, bags: RowBags, touched: Touched) -> torch.Tensor:
        """Pooled rows of this trainer's samples, float32 [B, F * D].

        ``bags`` are its lookups by slot. ``touched`` are the distinct slots that any trainer looks up in this
        batch, sorted, int64 [U], the same on every trainer.
        """
        pooled: torch.Tensor = _Lookup.apply(self._anchor, self, bags, touched)  # type: ignore[no-untyped-call]
        return pooled

    def filter_updates(self, rows: RowFilter, rows_in: Callable[[RowIds], RowIds]) -> None:
        """From now on update only the rows that ``rows`` keeps; ``rows_in`` tells which rows are in slots."""
        self.stay = lambda slots, gradients: rows.stay(rows_in(slots), gradients)


class _Lookup(torch.autograd.Function):
    """Pooling whose backward pass updates the table. The anchor makes autograd call it."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, table: SharedTable, bags: RowBags, touched: Touched
    ) -> torch.Tensor:
        ctx.call = (table, bags, touched)
        return bags.pooled(table.weights, torch.from_numpy(bags.distinct))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None, None]:
        """One optimizer step for the touched slots, from the gradients of this and the other trainers."""
        table, bags, touched = ctx.call
        dim = table.weights.shape[1]
        mine = bags.gradients(gradient, dim)
        partial = mine.new_zeros((len(touched), dim))
        partial[torch.from_numpy(np.searchsorted(touched, bags.distinct))] = mine
        total = table.channel.ordered_sum(partial.view(-1)).view(len(touched), dim)
        stay = None if table.stay is None else table.stay(touched, total)
        if stay is not None:
            touched, total = touched[stay.cpu().numpy()], total[stay]
        slots = torch.from_numpy(touched).to(table.weights.device)
        records = torch.cat((table.weights[slots], table.state[slots]), dim=1)
        records = updated(table.optimizer, records, total)
        table.weights.index_copy_(0, slots, records[:, :dim])
        table.state.index_copy_(0, slots, records[:, dim:])
        return None, None, None, None


MakeTable = Callable[[int], FusedTable | SharedTable]
"""Makes a table of so many slots."""


@dataclass(frozen=True)
class Section:
    """A part of a table, from place ``first`` on: the resident slots, or the slab."""

    table: FusedTable | SharedTable
    first: int
    weights: torch.Tensor
    """[rows, D], in their storage type: the table's memory."""
    state: torch.Tensor
    """float32 [rows, S]."""

    @classmethod
    def of(cls, table: FusedTable | SharedTable) -> Section:
        """All of ``table``."""
        return cls(table, 0, table.weights, table.state)

    def take(self, places: torch.Tensor) -> torch.Tensor:
        """A copy of the records in ``places`` (int64 [n]), float32 [n, width]."""
        # The state is float32, and so is what both are put together to.
        return torch.cat((self.weights.index_select(0, places), self.state.index_select(0, places)), dim=1)

    def put(self, places: torch.Tensor, records: torch.Tensor) -> None:
        """Replace the records in ``places`` (int64 [n], distinct)."""
        if not len(places):
            # Even an empty copy would tell autograd that the weights have changed since they were looked up.
            return
        weights = self.weights
        values, states = records[:, : weights.shape[1]], records[:, weights.shape[1] :]
        if weights.dtype != values.dtype:
            values = values.to(weights.dtype)
        with torch.no_grad():
            weights.index_copy_(0, places, values)
            self.state.index_copy_(0, places, states)


class Layout(ABC):
    """The resident slots and the slab of one group.

    ``occupied``: which rows are in them. ``transfer``: brings positions to the device. ``make``: makes their
    tables.
    """

    together: ClassVar[bool]
    """Whether slots and slab are in one table."""
    resident: Section
    slab: Section

    def __init__(self, tables: TableSet, occupied: Occupied, transfer: Transfer, make: MakeTable) -> None:
        self.tables, self.occupied, self.transfer, self.make = tables, occupied, transfer, make
        self.row_filter: RowFilter | None = None

    # -- a batch's moves ---------------------------------------------------------------------

    def moves(self, plan: TierPlan, slab_written: bool) -> Moves:
        """The moves of a plan after the batch before it, whose slab the store has if ``slab_written``."""
        slab, first, frozen = self.occupied.slab, self.slab.first, self.tables.optimizer.frozen
        counts, *arrays = moves_of(
            *(slab, slab_written, frozen, first, self.together),
            *(plan.evicted, plan.vacated, plan.slots, plan.carried_from),
        )
        return Moves(first, self.together, len(slab), *counts, *arrays)

    def prepare(self, lookups: Lookups, moves: Moves | None) -> Sent | None:
        """Begin to send the positions of ``moves``, if given, to the device, and to make what will be looked
        up."""
        sent = None if moves is None else self.transfer.send(*moves.positions)
        lookups.prepare(self.slab.first, at_once=False)
        return sent

    @abstractmethod
    def depart(
        self, moves: Moves, places: torch.Tensor, leaving: torch.Tensor, carried: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the records to write and of those that stay on the device; ``places`` and the others are
        positions of ``moves``."""

    @abstractmethod
    def put(self, moves: Moves, targets: torch.Tensor, fetched: torch.Tensor, carried: torch.Tensor) -> None:
        """Put ``fetched`` and then ``carried`` records into the places ``targets``."""

    @abstractmethod
    def reserved(self, slab_rows: int) -> Layout:
        """The layout, with room for so many slab rows; what the slab held has been taken out."""

    def slab_records(self) -> torch.Tensor:
        """A copy of the records in the slab, float32 [S, width]."""
        return self.slab.take(torch.arange(len(self.occupied.slab), device=self.slab.weights.device))

    # -- lookups -----------------------------------------------------------------------------

    def looks_up_at_once(self, lookups: Lookups) -> bool:
        """Whether both tiers are looked up at once."""
        return False

    def look_up(
        self, lookups: Lookups, in_slab: bool, warm: bool, cold: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The rows of each tier that is asked for (``GroupTables.compute`` has the shapes); ``in_slab``:
        whether any row is in the slab."""
        resident, slab = lookups.tiers(self.slab.first)
        return (
            self.resident.table(*resident) if warm else None,
            self.slab.table(*slab) if cold and in_slab else None,
        )

    def graph_lookup(self, lookups: Lookups, samples: int) -> GraphLookup | None:
        """The lookup of a batch of so many ``samples`` for a graph of kernels; None: it cannot be one."""
        return None

    @abstractmethod
    def filter_updates(self, rows: RowFilter) -> None:
        """Leave rows out of both tiers' updates."""

    def rows_in_slab(self, places: RowIds) -> RowIds:
        """The rows in these places of the slab."""
        return self.occupied.slab[places]


class TwoTables(Layout):
    """``resident`` slots, and a slab of ``slab_rows`` in a table of its own."""

    together = False

    def __init__(
        self,
        tables: TableSet,
        occupied: Occupied,
        transfer: Transfer,
        make: MakeTable,
        resident: Section,
        slab_rows: int,
    ) -> None:
        super().__init__(tables, occupied, transfer, make)
        self.resident, self.slab = resident, Section.of(make(slab_rows))

    def depart(
        self, moves: Moves, places: torch.Tensor, leaving: torch.Tensor, carried: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take from the slab, then from slots."""
        slab, slots = places.tensor_split((moves.in_slab,))
        records = torch.cat((self.slab.take(slab), self.resident.take(slots)))
        all_leave = len(moves.written) == len(moves.departing)
        return records if all_leave else records.index_select(0, leaving), records.index_select(0, carried)

    def put(self, moves: Moves, targets: torch.Tensor, fetched: torch.Tensor, carried: torch.Tensor) -> None:
        """Put fetched rows into slots, the others and the carried ones into the slab."""
        slots, in_slab, carried_to = targets.tensor_split((moves.to_slots, moves.fetched))
        self.resident.put(slots, fetched[: moves.to_slots])
        self.slab.put(in_slab, fetched[moves.to_slots :])
        self.slab.put(carried_to, carried)

    def reserved(self, slab_rows: int) -> TwoTables:
        """Itself, with another slab if this one is too small."""
        if slab_rows > len(self.slab.weights):
            self.slab = Section.of(self.make(1 << (slab_rows - 1).bit_length()))
            if self.row_filter is not None:
                self.slab.table.filter_updates(self.row_filter, self.rows_in_slab)
        return self

    def filter_updates(self, rows: RowFilter) -> None:
        """Leave rows out of both tables' updates."""
        self.row_filter = rows
        self.resident.table.filter_updates(rows, lambda places: self.occupied.rows[places])
        self.slab.table.filter_updates(rows, self.rows_in_slab)


class OneTable(Layout):
    """A table of ``slots`` places and ``slab_rows`` more behind them.

    A slab that becomes too small gets a table of its own: the layout is then another.
    """

    together = True

    def __init__(
        self,
        tables: TableSet,
        occupied: Occupied,
        transfer: Transfer,
        make: MakeTable,
        slots: int,
        slab_rows: int,
    ) -> None:
        super().__init__(tables, occupied, transfer, make)
        self.table = table = make(slots + slab_rows)
        # The slab's rows arrive while others have been looked up and not been updated. ``.data`` keeps torch
        # from treating this as a change of these.
        weights, state = table.weights.data, table.state.data
        self.whole = Section(table, 0, weights, state)
        self.resident = Section(table, 0, table.weights[:slots], table.state[:slots])
        self.slab = Section(table, slots, weights[slots:], state[slots:])

    def prepare(self, lookups: Lookups, moves: Moves | None) -> Sent | None:
        """Where both tiers are looked up at once, positions are sent together with places to look up."""
        if not self.looks_up_at_once(lookups):
            return super().prepare(lookups, moves)
        return lookups.prepare(self.slab.first, True, () if moves is None else moves.positions)

    def depart(
        self, moves: Moves, places: torch.Tensor, leaving: torch.Tensor, carried: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the rows to write, then those that stay, in the order of ``places``."""
        written, stay = self.whole.take(places).tensor_split((len(moves.written),))
        return written, stay

    def put(self, moves: Moves, targets: torch.Tensor, fetched: torch.Tensor, carried: torch.Tensor) -> None:
        """Put all by one copy."""
        self.whole.put(targets, torch.cat((fetched, carried)) if len(carried) else fetched)

    def reserved(self, slab_rows: int) -> Layout:
        """Itself, or two tables, of which the first goes on to have the slots."""
        if slab_rows <= len(self.slab.weights):
            return self
        size = 1 << (slab_rows - 1).bit_length()
        grown = TwoTables(self.tables, self.occupied, self.transfer, self.make, self.resident, size)
        if self.row_filter is not None:
            grown.row_filter = self.row_filter
            grown.slab.table.filter_updates(self.row_filter, grown.rows_in_slab)
        return grown

    def looks_up_at_once(self, lookups: Lookups) -> bool:
        """All batches but those that are cut."""
        return isinstance(lookups, GpuLookups) and lookups.order is None

    def look_up(
        self, lookups: Lookups, in_slab: bool, warm: bool, cold: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """All rows at once, unless the slab's are still to come."""
        if warm and (cold or not in_slab) and self.looks_up_at_once(lookups):
            assert isinstance(lookups, GpuLookups), "looked up at once"
            (bags,) = lookups.tiers(self.slab.first, at_once=True)
            return self.table(*bags), None
        return super().look_up(lookups, in_slab, warm, cold)

    def graph_lookup(self, lookups: Lookups, samples: int) -> GraphLookup | None:
        """Of one id in each bag, where nothing chooses among the rows to update and FBGEMM updates them, at a
        rate that does not change: kernels are recorded with it."""
        optimizer = self.tables.optimizer
        whole = self.row_filter is None and optimizer.fused and optimizer.schedule is None
        if not whole or not self.looks_up_at_once(lookups):
            return None
        assert isinstance(lookups, GpuLookups), "looked up at once"
        if not lookups.given.one_each or lookups.given.weights is not None:
            return None
        ((indices, offsets, _),) = lookups.tiers(self.slab.first, at_once=True)
        dim, features = self.tables.dim, len(self.tables.features)
        shape = (samples, features * dim) if self.tables.pooled else (len(indices), dim)
        return GraphLookup(self.table, indices, offsets, shape, self.table.weights.data_ptr())

    def filter_updates(self, rows: RowFilter) -> None:
        """Leave rows out of the table's updates."""
        self.row_filter = rows
        self.table.filter_updates(rows, self._rows_in)

    def _rows_in(self, places: RowIds) -> RowIds:
        in_slab = places >= self.slab.first
        rows = np.empty(len(places), np.int64)
        rows[~in_slab] = self.occupied.rows[places[~in_slab]]
        rows[in_slab] = self.rows_in_slab(places[in_slab] - self.slab.first)
        return rows
