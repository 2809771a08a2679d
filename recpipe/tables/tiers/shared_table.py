"""Rows of which every trainer holds a replica, updated from the gradients of all trainers.

Each trainer looks up and differentiates its own samples. A row's gradients are added over the trainers in
order, and all trainers apply the same update to the same bits, so that replicas never differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from recpipe.distributed.ranks import Channel
from recpipe.plugin.bags import RowIds, distinct
from recpipe.plugin.skipper import RowFilter
from recpipe.plugin.tables import TableSet
from recpipe.tables.rows import RowBags, updated
from recpipe.tables.tiers.lookups import CpuLookups, Lookups

Touched = NDArray[np.int64]
"""The distinct slots that at least one trainer looks up in a batch, sorted, int64 [U]; the same on every
trainer."""
Stay = Callable[[Touched, torch.Tensor], torch.Tensor | None]
"""Returns which of the slots to update from gradients float32 [U, D], as bool [U]; None: all."""


class SharedLookups(Lookups):
    """One trainer's lookups of a batch in each tier, by slot, and the slots that any trainer touches.

    ``whole``: all trainers' lookups, of which ``samples`` (int64 [n], in this order) are this trainer's;
    those from ``cold_first`` on may need the slab, which has ``slab_rows``.
    """

    def __init__(
        self, whole: CpuLookups, samples: NDArray[np.int64], cold_first: int, slab_rows: int
    ) -> None:
        own = whole.permuted(samples, cold_first)
        self.needs_cold = whole.needs_cold
        self._tiers = (
            (RowBags.of(own.resident), distinct(whole.resident.rows)),
            (RowBags.of(own.slab), np.arange(slab_rows)),
        )

    def tiers(self, slab_first: int = 0) -> tuple[tuple[RowBags, Touched], tuple[RowBags, Touched]]:
        """The lookups in each tier's ``SharedTable``."""
        return self._tiers


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

    def filter_updates(self, rows: RowFilter, rows_in: Callable[[RowIds], RowIds]) -> None:
        """From now on update only the rows that ``rows`` keeps; ``rows_in`` tells which rows are in slots."""
        self.stay = lambda slots, gradients: rows.stay(rows_in(slots), gradients)

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
