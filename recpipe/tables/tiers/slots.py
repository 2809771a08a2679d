"""The memory of a tier: slots that hold rows of any table, and copies into and out of them.

A single trainer keeps them in a fused TBE; each of several keeps a replica in a ``SharedTable``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from recpipe import seams
from recpipe.distributed.ranks import Channel
from recpipe.plugin.bags import RowIds
from recpipe.plugin.skipper import RowFilter
from recpipe.plugin.tables import TableSet
from recpipe.tables.collection import make_tbe
from recpipe.tables.skipping import filter_lookups
from recpipe.tables.tiers.shared_rows import SharedTable


class FusedTable(nn.Module):
    """``rows`` slots for rows of any table, in a fused TBE, whose backward pass makes the update."""

    def __init__(self, tables: TableSet, rows: int, device: torch.device) -> None:
        super().__init__()
        self.tbe = make_tbe(tables, rows, device)
        self.weights, self.state = seams.tbe_views(self.tbe)[0]
        """[rows, D], in their storage type, and optimizer state float32 [rows, S]: the TBE's memory."""

    def forward(self, *bags: torch.Tensor | None) -> torch.Tensor:
        """As the TBE: rows of indices, offsets and weights, pooled."""
        pooled: torch.Tensor = self.tbe(*bags)
        return pooled


Table = FusedTable | SharedTable


@dataclass(frozen=True)
class Room:
    """A part of a table, from place ``first`` on: the resident slots, or the slab."""

    table: Table
    first: int
    weights: torch.Tensor
    """[rows, D], in their storage type: the table's memory."""
    state: torch.Tensor
    """float32 [rows, S]."""

    @classmethod
    def of(cls, table: Table) -> Room:
        """All of ``table``."""
        return cls(table, 0, table.weights, table.state)

    @classmethod
    def parts(cls, table: Table, slots: int) -> tuple[Room, Room, Room]:
        """All of ``table``, the resident slots, which come first in it, and the slab.

        The slab's rows arrive while others have been looked up and not been updated. ``.data`` keeps torch
        from treating this as a change of these.
        """
        weights, state = table.weights.data, table.state.data
        resident = cls(table, 0, table.weights[:slots], table.state[:slots])
        return cls(table, 0, weights, state), resident, cls(table, slots, weights[slots:], state[slots:])


def make_slots(tables: TableSet, rows: int, device: torch.device, trainers: Channel | None) -> Table:
    """``rows`` slots on ``device``; ``trainers`` is the channel between several trainers, None for one."""
    if trainers is None:
        return FusedTable(tables, rows, device)
    return SharedTable(tables, rows, device, trainers)


def filter_slots(
    table: Table, rows: RowFilter, rows_in: Callable[[RowIds], RowIds], tables: TableSet
) -> None:
    """Make ``table`` update only the rows that ``rows`` keeps; ``rows_in`` tells which rows are in slots."""
    if isinstance(table, SharedTable):
        table.stay = lambda slots, gradients: rows.stay(rows_in(slots), gradients)
        return
    features = len(tables.features) if tables.pooled else 1
    filter_lookups(table.tbe, rows, lambda slots, _: rows_in(slots), features, pooled=True)


def take(room: Room, slots: torch.Tensor) -> torch.Tensor:
    """A copy of the records in ``slots`` (int64 [n]), float32 [n, width]."""
    # The state is float32, and so is what both are put together to.
    return torch.cat((room.weights.index_select(0, slots), room.state.index_select(0, slots)), dim=1)


def put(room: Room, slots: torch.Tensor, records: torch.Tensor) -> None:
    """Replace the records of ``slots`` (int64 [n], distinct)."""
    if not len(slots):
        # Even an empty copy would tell autograd that the weights have changed since they were looked up.
        return
    weights, state = room.weights, room.state
    values, states = records[:, : weights.shape[1]], records[:, weights.shape[1] :]
    if weights.dtype != values.dtype:
        values = values.to(weights.dtype)
    with torch.no_grad():
        weights.index_copy_(0, slots, values)
        state.index_copy_(0, slots, states)
