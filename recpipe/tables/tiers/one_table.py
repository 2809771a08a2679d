"""Slots and slab in one table, as a GPU has them: a batch is looked up and updated at once, by one TBE, and
rows move by one copy of positions."""

from __future__ import annotations

import numpy as np
import torch

from recpipe.plugin.bags import RowIds
from recpipe.plugin.skipper import RowFilter
from recpipe.plugin.tables import TableSet
from recpipe.tables.group_rows import GraphLookup
from recpipe.tables.tiers.gpu_lookups import GpuLookups
from recpipe.tables.tiers.layout import Layout, Section
from recpipe.tables.tiers.lookups import Lookups
from recpipe.tables.tiers.moves import Moves
from recpipe.tables.tiers.occupied import Occupied
from recpipe.tables.tiers.slots import MakeSlots
from recpipe.tables.tiers.transfer import Sent, Transfer
from recpipe.tables.tiers.two_tables import TwoTables


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
        slots: int,
        slab_rows: int,
        make: MakeSlots,
    ) -> None:
        super().__init__(tables, occupied, transfer)
        self._make = make
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
        grown = TwoTables(self.tables, self.occupied, self.transfer, self.resident, size, self._make)
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
            return self.table(*lookups.both(self.slab.first)), None
        return super().look_up(lookups, in_slab, warm, cold)

    def graph_lookup(self, lookups: Lookups, samples: int) -> GraphLookup | None:
        """Of one id in each bag, where nothing chooses among the rows to update."""
        if self.row_filter is not None or not self.looks_up_at_once(lookups):
            return None
        assert isinstance(lookups, GpuLookups), "looked up at once"
        if not lookups.given.one_each or lookups.given.weights is not None:
            return None
        indices, offsets, _ = lookups.both(self.slab.first)
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
