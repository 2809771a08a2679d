"""A table of slots that hold rows of any table of a group.

A single trainer keeps rows in a fused TBE; each of several keeps a replica in a ``SharedTable``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from recpipe import private_api
from recpipe.plugin.bags import RowIds
from recpipe.plugin.skipper import RowFilter
from recpipe.plugin.tables import TableSet
from recpipe.tables.collection import make_tbe
from recpipe.tables.skipping import FilteredLookups
from recpipe.tables.tiers.shared_table import SharedTable


class FusedTable(nn.Module):
    """``rows`` slots for rows of any table, in a fused TBE, whose backward pass makes the update."""

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


SlotTable = FusedTable | SharedTable
MakeSlots = Callable[[int], SlotTable]
"""Makes a table of so many slots."""
