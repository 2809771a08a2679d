"""Where rows on the device are: in resident slots, or in the slab, which has rows that one batch alone needs.

A layout moves rows in and out of places and looks them up. It knows no policy and no store: ``tiered`` does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from recpipe.plugin.bags import RowIds
from recpipe.plugin.skipper import RowFilter
from recpipe.plugin.tables import TableSet
from recpipe.tables.group_rows import GraphLookup
from recpipe.tables.tiers.lookups import Lookups
from recpipe.tables.tiers.moves import Moves
from recpipe.tables.tiers.occupied import Occupied
from recpipe.tables.tiers.plan import TierPlan
from recpipe.tables.tiers.slots import SlotTable
from recpipe.tables.tiers.transfer import Sent, Transfer


@dataclass(frozen=True)
class Section:
    """A part of a table, from place ``first`` on: the resident slots, or the slab."""

    table: SlotTable
    first: int
    weights: torch.Tensor
    """[rows, D], in their storage type: the table's memory."""
    state: torch.Tensor
    """float32 [rows, S]."""

    @classmethod
    def of(cls, table: SlotTable) -> Section:
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

    ``occupied``: which rows are in them. ``transfer``: brings positions to the device.
    """

    together: ClassVar[bool]
    """Whether slots and slab are in one table."""
    resident: Section
    slab: Section

    def __init__(self, tables: TableSet, occupied: Occupied, transfer: Transfer) -> None:
        self.tables, self.occupied, self.transfer = tables, occupied, transfer
        self.row_filter: RowFilter | None = None

    # -- a batch's moves ---------------------------------------------------------------------

    def moves(self, plan: TierPlan, slab_written: bool) -> Moves:
        """The moves of a plan after the batch before it, whose slab the store has if ``slab_written``."""
        slab, frozen = self.occupied.slab, self.tables.optimizer.frozen
        return Moves.of(plan, slab, slab_written, self.slab.first, self.together, frozen)

    def fits(self, moves: Moves) -> bool:
        """Whether ``moves`` are in places of this layout."""
        return (moves.slab_first, moves.together) == (self.slab.first, self.together)

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

    # -- rows between two batches ------------------------------------------------------------

    def slab_records(self) -> torch.Tensor:
        """A copy of the records in the slab, float32 [S, width]."""
        return self.slab.take(torch.arange(len(self.occupied.slab), device=self.slab.weights.device))

    @property
    def slab_bytes(self) -> int:
        """Memory of the slab."""
        return sum(part.numel() * 4 for part in (self.slab.weights, self.slab.state))

    @abstractmethod
    def filter_updates(self, rows: RowFilter) -> None:
        """Leave rows out of both tiers' updates."""

    def rows_in_slab(self, places: RowIds) -> RowIds:
        """The rows in these places of the slab."""
        return self.occupied.slab[places]
