"""Slots and slab in two tables: on a CPU, where the slab's size changes often; for several trainers, each of
which has replicas; and on a GPU once a slab has outgrown the one table."""

from __future__ import annotations

import torch

from recpipe.plugin.skipper import RowFilter
from recpipe.plugin.tables import TableSet
from recpipe.tables.tiers.layout import Layout, Section
from recpipe.tables.tiers.moves import Moves
from recpipe.tables.tiers.occupied import Occupied
from recpipe.tables.tiers.slots import MakeSlots
from recpipe.tables.tiers.transfer import Transfer


class TwoTables(Layout):
    """``resident`` slots, and a slab in a table of its own, which ``make`` makes."""

    together = False

    def __init__(
        self,
        tables: TableSet,
        occupied: Occupied,
        transfer: Transfer,
        resident: Section,
        slab_rows: int,
        make: MakeSlots,
    ) -> None:
        super().__init__(tables, occupied, transfer)
        self._make = make
        self.resident, self.slab = resident, Section.of(make(slab_rows))

    def depart(
        self, moves: Moves, places: torch.Tensor, leaving: torch.Tensor, carried: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take from the slab, then from slots."""
        slab, slots = places.tensor_split((moves.in_slab,))
        records = torch.cat((self.slab.take(slab), self.resident.take(slots)))
        leave = records if moves.all_leave else records.index_select(0, leaving)
        return leave, records.index_select(0, carried)

    def put(self, moves: Moves, targets: torch.Tensor, fetched: torch.Tensor, carried: torch.Tensor) -> None:
        """Put fetched rows into slots, the others and the carried ones into the slab."""
        slots, in_slab, carried_to = targets.tensor_split((moves.to_slots, moves.fetched))
        self.resident.put(slots, fetched[: moves.to_slots])
        self.slab.put(in_slab, fetched[moves.to_slots :])
        self.slab.put(carried_to, carried)

    def reserved(self, slab_rows: int) -> TwoTables:
        """Itself, with another slab if this one is too small."""
        if slab_rows > len(self.slab.weights):
            self.slab = Section.of(self._make(1 << (slab_rows - 1).bit_length()))
            if self.row_filter is not None:
                self.slab.table.filter_updates(self.row_filter, self.rows_in_slab)
        return self

    def filter_updates(self, rows: RowFilter) -> None:
        """Leave rows out of both tables' updates."""
        self.row_filter = rows
        self.resident.table.filter_updates(rows, lambda places: self.occupied.rows[places])
        self.slab.table.filter_updates(rows, self.rows_in_slab)
