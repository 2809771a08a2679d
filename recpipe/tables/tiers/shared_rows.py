"""Rows of which every trainer holds a replica, updated from the gradients of all trainers.

Each trainer looks up and differentiates its own samples. A row's gradients are added over the trainers in
order, and all trainers apply the same update to the same bits, so that replicas never differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.distributed.ranks import Channel
from recpipe.plugin.bags import IndexBags, RowIds, distinct
from recpipe.plugin.tables import Region, TableSet, Values, to_numpy
from recpipe.tables.collection import AllResident
from recpipe.tables.rowtable import RowBags, row_bags, updated
from recpipe.tables.tiers.parting import Parted
from recpipe.tables.tiers.placement import TierPlan, reorder

if TYPE_CHECKING:
    from recpipe.plugin.skipper import RowFilter

Touched = NDArray[np.int64]
"""The distinct slots that at least one trainer looks up in a batch, sorted, int64 [U]; the same on every
trainer."""
Stay = Callable[[Touched, torch.Tensor], torch.Tensor | None]
"""Returns which of the slots to update from gradients float32 [U, D], as bool [U]; None: all."""


@dataclass(frozen=True)
class SharedLookups:
    """One trainer's lookups of a batch in each tier, by slot, and the slots that any trainer touches."""

    resident: tuple[RowBags, Touched]
    slab: tuple[RowBags, Touched]


def share(plan: TierPlan, samples: NDArray[np.int64], cold_first: int) -> TierPlan:
    """This trainer's part of ``plan``: its ``samples`` (int64 [n]), in this order; those from ``cold_first``
    on may need the slab. The rows that move stay the same."""
    whole = plan.lookups
    assert isinstance(whole, Parted), "several trainers plan on the CPU"
    touched, slab = distinct(whole.indices), np.arange(len(plan.slab))
    reorder(plan, samples, cold_first)
    own = plan.lookups
    assert isinstance(own, Parted), "as before"
    size, cold = plan.batch_size, plan.batch_size - cold_first
    if own.bags is not None:  # a bag for each id
        size = cold = int(own.bags[-1])
    plan.shared = SharedLookups(
        (RowBags.of(IndexBags(own.indices, own.offsets, size, own.weights)), touched),
        (RowBags.of(IndexBags(own.slab_indices, own.slab_offsets, cold, own.slab_weights)), slab),
    )
    return plan


class SharedTable(nn.Module):
    """``rows`` slots for rows of any table, with weights float32 [rows, D] and optimizer state [rows, S].

    It replaces a fused TBE: the backward pass makes the update.
    """

    def __init__(self, tables: TableSet, rows: int, device: torch.device, channel: Channel) -> None:
        super().__init__()
        self.optimizer = tables.optimizer
        self.channel = channel
        self.weights = torch.zeros((rows, tables.dim), device=device)
        self.state = torch.zeros((rows, tables.layout.width - tables.dim), device=device)
        self.stay: Stay | None = None
        """Decides which slots to update; None: all."""
        self._anchor = torch.zeros(0, device=device, requires_grad=True)

    def forward(self, bags: RowBags, touched: Touched) -> torch.Tensor:
        """Pooled rows of this trainer's samples, float32 [B, F * D].

        ``bags`` are its lookups by slot. ``touched`` are the distinct slots that any trainer looks up in this
        batch, sorted, int64 [U], the same on every trainer.
        """
        pooled: torch.Tensor = _Lookup.apply(self._anchor, self, bags, touched)  # type: ignore[no-untyped-call]
        return pooled

    def update(self, bags: RowBags, touched: Touched, pooled: torch.Tensor) -> None:
        """Make one optimizer step for the ``touched`` slots, from the gradients of this and the other
        trainers' pooled rows."""
        dim = self.weights.shape[1]
        mine = bags.gradients(pooled, dim)
        partial = mine.new_zeros((len(touched), dim))
        partial[torch.from_numpy(np.searchsorted(touched, bags.distinct))] = mine
        total = self.channel.ordered_sum(partial.view(-1)).view(len(touched), dim)
        stay = None if self.stay is None else self.stay(touched, total)
        if stay is not None:
            touched, total = touched[stay.cpu().numpy()], total[stay]
        slots = torch.from_numpy(touched).to(self.weights.device)
        records = torch.cat((self.weights[slots], self.state[slots]), dim=1)
        records = updated(self.optimizer, records, total)
        self.weights.index_copy_(0, slots, records[:, :dim])
        self.state.index_copy_(0, slots, records[:, dim:])


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
        table, bags, touched = ctx.call
        table.update(bags, touched, gradient)
        return None, None, None, None


class ReplicatedCollection(AllResident):
    """All rows on every trainer (``tiers.policy=resident`` with several trainers), as replicas with equal
    bits."""

    replicated = True

    def __init__(self, tables: TableSet, device: torch.device, trainers: Channel) -> None:
        super().__init__(tables)
        self.trainers = trainers
        self.table = SharedTable(tables, tables.layout.total_rows, device, trainers)
        self.fill_first_values()

    def filter_updates(self, rows: RowFilter) -> None:
        """Leave rows out of the update, on every trainer."""
        self.row_filter, self.table.stay = rows, rows.stay

    def lookup(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        """Rows of this trainer's samples. The trainers tell each other which rows they look up."""
        bags = row_bags(self.tables, sparse)
        if torch.is_grad_enabled() and not self.tables.optimizer.frozen:
            touched = distinct(np.concatenate(self.trainers.gather(bags.distinct)))
            rows: torch.Tensor = self.table(bags, touched)
            return rows
        return bags.pooled(self.table.weights, torch.from_numpy(bags.distinct))

    def records_of(self, rows: RowIds) -> torch.Tensor:
        """A copy of the records of distinct ``rows``, float32 [n, width]."""
        at = torch.from_numpy(rows)
        return torch.cat((self.table.weights[at], self.table.state[at]), dim=1)

    def replace_records(self, rows: RowIds, records: torch.Tensor) -> None:
        """Replace the records of distinct ``rows`` by ``records`` on this trainer."""
        at = torch.from_numpy(rows)
        self.table.weights[at] = records[:, : self.tables.dim]
        self.table.state[at] = records[:, self.tables.dim :]

    def read(self, region: Region) -> Values:
        """Current weights and optimizer state of ``region``."""
        records = to_numpy(self.records_of(self.rows_of(region)))
        return records[:, : self.tables.dim], records[:, self.tables.dim :]

    def write(self, region: Region, values: Values) -> None:
        """Replace the weights and optimizer state of ``region``."""
        records = torch.from_numpy(np.concatenate(values, axis=1)).to(self.table.weights.device)
        self.replace_records(self.rows_of(region), records)
