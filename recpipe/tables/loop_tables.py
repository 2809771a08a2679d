"""FBGEMM's tables on a CPU, which loops of recpipe's own look up and update where those are faster.

Rows stay in FBGEMM's memory, and optimizer state in that of whoever makes the update otherwise, so that all
else reads and writes them as ever, and any lookup may be made by either. Lookups have the same bits, but for
those of weighted ids; updates differ in the order in which squares of a row's gradient are added, and in
nothing with ``sgd``.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import get_ident
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torchrec.modules.embedding_configs import DataType

from recpipe import private_api
from recpipe.common.loops import cut
from recpipe.common.teams import share_out
from recpipe.plugin.tables import TableSet
from recpipe.tables.fused_update import KINDS, update_rows
from recpipe.tables.pooling import pool_rows
from recpipe.tables.updating import OwnUpdates, knobs_of

LEAST = 1 << 17
"""Numbers of rows that a thread looks up or updates at least; fewer take no longer than waking it."""
STORAGES = (DataType.FP32, DataType.FP16)
"""The types of rows that there are loops for. Those of 16 bits are rounded to the nearest value."""
_UNWEIGHTED = np.empty(0, np.float32)


class Loops:
    """The loops over the memory of a TBE: physical tables of one dimension, whose type is in ``STORAGES``,
    summed by bag.

    ``tables``: whose rows they hold; its ``kernel`` says which lookups loops make. ``features_of``: each
    feature's physical table. ``state``: of all rows, one after the other, float32.
    """

    def __init__(
        self,
        tables: TableSet,
        features_of: Sequence[int],
        tbe: SplitTableBatchedEmbeddingBagsCodegen,
        state: torch.Tensor,
    ) -> None:
        self.kernel, self.own = tables.kernel, tables.optimizer
        self._kind = KINDS.index("sgd" if self.own.frozen else self.own.name)
        width = self.own.state_width(tables.dim)
        rows = np.cumsum([0, *(len(weights) for weights in tbe.split_embedding_weights())])
        firsts = rows[list(features_of)]
        self._dim, self._bases, self._states = tables.dim, firsts * tables.dim, firsts * width
        self.table_of = np.array(features_of, np.int64)
        """Each feature's table, int64 [F]: no row is looked up by features of two."""
        self._weights = _as_loops_take(private_api.whole_weights(tbe).view(-1))
        self._state = state.view(-1).numpy()

    @property
    def make_lookups(self) -> bool:
        """Whether they look up what is asked for now, and update it: not where torch's operators are
        watched, which loops are none of."""
        return self.kernel.by_loops and not private_api.operators_are_watched()

    def look_up(
        self, indices: torch.Tensor, offsets: torch.Tensor, factors: torch.Tensor | None
    ) -> torch.Tensor:
        """The sums of the features' bags, float32 [B, F * D], without a graph; indices and offsets are int64,
        the ids' ``factors`` float32."""
        features = len(self._bases)
        samples = (len(offsets) - 1) // features
        out = torch.empty(samples, features * self._dim)
        least = 1 + LEAST * samples // max(1, len(indices) * self._dim)
        ids = indices.numpy(), offsets.numpy(), _array(factors)
        given = (self._weights, self._bases, *ids, out.view(-1).numpy(), self._dim)
        share_out(pool_rows, given, cut(samples, least, torch.get_num_threads()))
        return out

    def update(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        factors: torch.Tensor | None,
        gradient: torch.Tensor,
        rate: float,
        threads: int,
    ) -> None:
        """One step of each row that was looked up, by the sum of its bags' ``gradient`` [B, F * D]."""
        given = (
            *(self._kind, knobs_of(self.own, rate), self._weights, self._state),
            *(self._bases, self._states, self.table_of, indices.numpy(), offsets.numpy()),
            *(_array(factors), gradient.contiguous().view(-1).numpy(), self._dim),
        )
        count = len(cut(len(indices) * self._dim, LEAST, threads)) - 1
        ends = self._cuts(offsets, count) if count > 1 else [0, len(self._bases)]
        share_out(update_rows, given, ends)

    def _cuts(self, offsets: torch.Tensor, count: int) -> list[int]:
        """The ends of at most ``count`` parts of the features with about as many lookups each, between
        tables."""
        features = len(self._bases)
        ends = offsets.numpy()[:: (len(offsets) - 1) // features]
        wanted = ends[-1] * np.arange(1, count) // count
        first = np.flatnonzero(np.diff(self.table_of, prepend=-1))  # of each table
        inner = first[np.clip(np.searchsorted(ends[first], wanted), 0, len(first) - 1)]
        return [0, *np.unique(inner[inner > 0]).tolist(), features]


class _BesideLoops:
    """A TBE whose lookups ``loops`` make where those are chosen, and else its other class."""

    loops: Loops
    _anchor: torch.Tensor

    def forward(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The sums of the features' bags, float32 [B, F * D]."""
        if self.loops.make_lookups:
            given = (self._anchor, self, indices, offsets, per_sample_weights)
            made: torch.Tensor = _ByLoops.apply(*given)  # type: ignore[no-untyped-call]
            return made
        found: torch.Tensor = super().forward(  # type: ignore[misc]
            indices, offsets, per_sample_weights
        )
        return found


class LoopTables(_BesideLoops, SplitTableBatchedEmbeddingBagsCodegen):  # type: ignore[misc]
    """A TBE with loops beside FBGEMM's kernels (``Loops``). ``named``: FBGEMM's arguments."""

    def __init__(self, tables: TableSet, features_of: Sequence[int], **named: Any) -> None:
        super().__init__(**named)
        self.loops = Loops(tables, features_of, self, private_api.whole_state(self))
        self._anchor = torch.zeros(0, requires_grad=True)


class LoopUpdates(_BesideLoops, OwnUpdates):
    """Tables of an optimizer that FBGEMM does not fuse, with loops beside its lookup and recpipe's update."""

    def __init__(self, tables: TableSet, features_of: Sequence[int], **named: Any) -> None:
        super().__init__(tables.optimizer, features_of, **named)
        self.loops = Loops(tables, features_of, self, self.state)


def _as_loops_take(weights: torch.Tensor) -> Any:
    """Weights as ``recpipe.common.vectors`` takes them."""
    return (weights if weights.dtype == torch.float32 else weights.view(torch.int16)).numpy()


def _array(factors: torch.Tensor | None) -> Any:
    return _UNWEIGHTED if factors is None else factors.numpy()


class _ByLoops(torch.autograd.Function):
    """A lookup whose backward pass updates the rows. The anchor makes autograd call it.

    Both use as many threads as torch's operators have at the lookup, which is one where other cores train
    parts of the batch meanwhile. The backward pass itself always has one. In another thread than the lookup's
    the update is beside other work, and one thread makes it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        tbe: _BesideLoops,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        factors: torch.Tensor | None,
    ) -> torch.Tensor:
        own = None if factors is None else factors.detach().float().contiguous()
        lookups = (indices.long().contiguous(), offsets.long().contiguous(), own)
        ctx.call, ctx.threads, ctx.thread = (tbe, *lookups), torch.get_num_threads(), get_ident()
        return tbe.loops.look_up(*lookups)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, ...]:
        tbe, *lookups = ctx.call
        threads = ctx.threads if ctx.thread == get_ident() else 1
        tbe.loops.update(*lookups, gradient, tbe.get_learning_rate(), threads)
        return None, None, None, None, None
