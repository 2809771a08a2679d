"""FBGEMM's tables on a CPU, which loops of recpipe's own look up and update where those are faster.

Rows and optimizer state stay in FBGEMM's memory, so that all else reads and writes them as ever, and any
lookup may be made by either. Lookups have the same bits; updates differ in the order in which squares of a
row's gradient are added, and in nothing with ``sgd``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen

from recpipe import private_api
from recpipe.common.loops import shared_spread
from recpipe.plugin.tables import TableSet
from recpipe.tables.fused_update import KINDS, update_rows
from recpipe.tables.pooling import pool_rows

LEAST = 1 << 17
"""Numbers of rows that a thread looks up or updates at least; fewer take no longer than waking it."""


class LoopTables(SplitTableBatchedEmbeddingBagsCodegen):  # type: ignore[misc]
    """Physical tables of float32 rows of one dimension that are summed by bag.

    ``tables``: whose rows they hold; its ``kernel`` says which lookups loops make. ``features_of``: each
    feature's physical table. ``named``: FBGEMM's arguments.
    """

    def __init__(self, tables: TableSet, features_of: Sequence[int], **named: Any) -> None:
        super().__init__(**named)
        self.kernel = tables.kernel
        own = tables.optimizer
        self._kind, self._eps = KINDS.index("sgd" if own.frozen else own.name), own.eps
        width = own.state_width(tables.dim)
        rows = np.cumsum([0, *(len(weights) for weights in self.split_embedding_weights())])
        firsts = rows[list(features_of)]
        self._dim, self._bases, self._states = tables.dim, firsts * tables.dim, firsts * width
        self.table_of = np.array(features_of, np.int64)
        """Each feature's table, int64 [F]: no row is looked up by features of two."""
        self._weights = private_api.whole_weights(self).view(-1).numpy()
        self._state = private_api.whole_state(self).numpy()
        self._anchor = torch.zeros(0, requires_grad=True)

    def forward(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The sums of the features' bags, float32 [B, F * D]."""
        if per_sample_weights is None and self.kernel.by_loops:
            made: torch.Tensor = _ByLoops.apply(self._anchor, self, indices, offsets)  # type: ignore[no-untyped-call]
            return made
        found: torch.Tensor = super().forward(indices, offsets, per_sample_weights)
        return found

    def look_up(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """``forward`` by loops, without a graph; indices and offsets are int64."""
        features = len(self._bases)
        samples = (len(offsets) - 1) // features
        out = torch.empty(samples, features * self._dim)
        spread = shared_spread(self.kernel.threads)
        parts = spread.parts(samples, 1 + LEAST * samples // max(1, len(indices) * self._dim))
        given = (self._weights, self._bases, indices.numpy(), offsets.numpy())
        pool = partial(pool_rows, *given, out.view(-1).numpy(), self._dim)
        spread.map(pool, [part.start for part in parts], [part.stop for part in parts])
        return out

    def update(self, indices: torch.Tensor, offsets: torch.Tensor, gradient: torch.Tensor) -> None:
        """One step of each row that was looked up, by the sum of its bags' ``gradient`` [B, F * D]."""
        update = partial(
            update_rows,
            *(self._kind, np.array([self.get_learning_rate(), self._eps]), self._weights, self._state),
            *(self._bases, self._states, self.table_of, indices.numpy(), offsets.numpy()),
            *(gradient.contiguous().view(-1).numpy(), self._dim),
        )
        spread = shared_spread(self.kernel.threads)
        count = len(spread.parts(len(indices) * self._dim, LEAST))
        cuts = self._cuts(offsets, count) if count > 1 else [0, len(self._bases)]
        spread.map(update, cuts[:-1], cuts[1:])

    def _cuts(self, offsets: torch.Tensor, count: int) -> list[int]:
        """The ends of at most ``count`` parts of the features with about as many lookups each, between
        tables."""
        features = len(self._bases)
        ends = offsets.numpy()[:: (len(offsets) - 1) // features]
        wanted = ends[-1] * np.arange(1, count) // count
        first = np.flatnonzero(np.diff(self.table_of, prepend=-1))  # of each table
        inner = first[np.clip(np.searchsorted(ends[first], wanted), 0, len(first) - 1)]
        return [0, *np.unique(inner[inner > 0]).tolist(), features]


class _ByLoops(torch.autograd.Function):
    """A lookup whose backward pass updates the rows. The anchor makes autograd call it."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, tables: LoopTables, indices: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        ctx.call = (tables, indices.long().contiguous(), offsets.long().contiguous())
        return tables.look_up(*ctx.call[1:])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, ...]:
        tables, *lookups = ctx.call
        tables.update(*lookups, gradient)
        return None, None, None, None
