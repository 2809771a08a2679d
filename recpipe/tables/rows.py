"""The rows that a batch's ids stand for, numbered over the tables of a group; and their lookup, gradients and
updates as plain tensor functions.

FBGEMM's fused tables update in their own backward pass, from the gradient of one process. Where several
trainers share a row, its gradients must be added first: these functions do the same arithmetic in separate
steps. Sums are made in the order of the lookups, so that equal inputs give equal bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.common.loops import ALONE, Spread
from recpipe.data.parts import in_order, unknown_id
from recpipe.plugin.averaging import Points
from recpipe.plugin.bags import Bags, Offsets, RowIds
from recpipe.plugin.tables import TableOptimizer, TableSet
from recpipe.tables.updating import stepped


def table_bags(tables: TableSet, sparse: KeyedJaggedTensor, spread: Spread = ALONE) -> Bags:
    """The batch's lookups as rows of the set, with features in the tables' order, independent of that in
    ``sparse``."""
    sparse = in_order(sparse, tables.features)
    values = sparse.values().cpu().numpy()
    offsets = sparse.offsets().cpu().numpy().astype(np.int64, copy=False)
    size = sparse.stride()
    ends = offsets[np.arange(len(tables.features) + 1) * size]
    weights = sparse.weights().detach().float().cpu().numpy() if tables.weighted else None
    return Bags(checked_rows(tables, values, ends, spread), offsets, size, weights)


def checked_rows(tables: TableSet, ids: RowIds, ends: Offsets, spread: Spread = ALONE) -> RowIds:
    """The rows of ``ids`` (int32 or int64 [L]), of which those of feature f are ``ends[f]`` up to
    ``ends[f + 1]``.

    Raises ``DataError`` if an id is not in its table.
    """
    bases, counts = tables.layout.bases[tables.table_of], np.diff(ends)
    sizes = np.diff(tables.layout.bases)[tables.table_of]
    rows = np.empty(len(ids), np.int64)

    def check(features: NDArray[np.int64]) -> None:
        used = features[counts[features] > 0]
        if not len(used):
            return
        # As an unsigned number, an id below 0 is above all others.
        unsigned = ids.view(f"u{ids.itemsize}")
        part = slice(ends[used[0]], ends[used[-1] + 1])
        most = np.maximum.reduceat(unsigned[part], ends[used] - part.start)
        for feature in used[most >= sizes[used].astype(np.uint64)]:
            own = slice(ends[feature], ends[feature + 1])
            at = int(np.argmax(unsigned[own] >= sizes[feature]))
            raise unknown_id(ids[own][at], tables.features[feature], sizes[feature])
        np.add(ids[part], np.repeat(bases[used], counts[used]), out=rows[part])

    threads = min(len(spread.parts(len(ids))), len(counts))
    spread.map(check, np.array_split(np.arange(len(counts)), threads))
    return rows


@dataclass(frozen=True)
class RowBags:
    """One trainer's lookups of a batch by distinct row, prepared once for the forward and the backward pass.

    ``distinct`` are the rows looked up, sorted, int64 [U]; ``which`` [L] is the position of each lookup's row
    among them.
    """

    distinct: NDArray[np.int64]
    which: torch.Tensor
    offsets: torch.Tensor
    """Bag i has lookups [offsets[i], offsets[i + 1]), feature-major as in a KJT: int64 [F * B + 1]."""
    bag_of: torch.Tensor
    """The bags in which each row is looked up, row after row, int64 [L]."""
    starts: torch.Tensor
    """Where each row's bags begin in ``bag_of``, int64 [U]."""
    batch_size: int
    weights: torch.Tensor | None = None
    """Weights of the lookups, float32 [L], if ids have weights."""
    weight_of: torch.Tensor | None = None
    """The same weights in the order of ``bag_of``."""

    @classmethod
    def of(cls, bags: Bags) -> RowBags:
        """Make it from a batch's lookups in one matrix of rows."""
        order = np.argsort(bags.rows, kind="stable")
        ordered = bags.rows[order]
        first = np.ones(len(ordered), bool)
        first[1:] = ordered[1:] != ordered[:-1]
        which = np.empty(len(ordered), np.int64)
        which[order] = np.cumsum(first) - 1
        bag_of_lookup = np.repeat(np.arange(len(bags.offsets) - 1), np.diff(bags.offsets))
        return cls(
            ordered[first],
            torch.from_numpy(which),
            torch.from_numpy(bags.offsets),
            torch.from_numpy(bag_of_lookup[order]),
            torch.from_numpy(np.flatnonzero(first)),
            bags.batch_size,
            None if bags.weights is None else torch.from_numpy(bags.weights),
            None if bags.weights is None else torch.from_numpy(bags.weights[order]),
        )

    def pooled(self, weights: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Sums of rows per bag, float32 [B, F * D]. ``weights`` [.., D] has distinct row u at
        ``positions[u]`` (None: at u)."""
        at = self.which if positions is None else positions[self.which]
        return pool(weights, at, self.offsets, self.batch_size, self.weights)

    def gradients(self, pooled: torch.Tensor, dim: int) -> torch.Tensor:
        """Gradient of every distinct row, float32 [U, D], from that of ``pooled`` (float32 [B, F * D])."""
        if not len(self.distinct):
            return pooled.new_zeros((0, dim))
        bags = pooled.view(self.batch_size, -1, dim).transpose(0, 1).reshape(-1, dim)
        bag_of, starts = self.bag_of.to(bags.device), self.starts.to(bags.device)
        weights = None if self.weight_of is None else self.weight_of.to(bags.device)
        return torch.nn.functional.embedding_bag(bag_of, bags, starts, mode="sum", per_sample_weights=weights)


def row_bags(tables: TableSet, sparse: KeyedJaggedTensor) -> RowBags:
    """A trainer's lookups in ``tables``. If rows are not pooled, every id is a bag."""
    found = table_bags(tables, sparse)
    return RowBags.of(found if tables.pooled else found.apart())


def looked_up(
    tables: TableSet,
    weights: torch.Tensor,
    which: NDArray[np.int64],
    bags: Bags,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """The result of a lookup in which lookup i of ``bags`` finds row ``which[i]`` of float32 ``weights`` [U,
    D]. ``scale``: the lookups' own weights in the graph, [L]; None: those of ``bags``."""
    at = torch.from_numpy(which).to(weights.device)
    if not tables.pooled:
        return weights[at]
    if scale is None and bags.weights is not None:
        scale = torch.from_numpy(bags.weights)
    return pool(weights, at, torch.from_numpy(bags.offsets), bags.batch_size, scale)


def pool(
    weights: torch.Tensor,
    at: torch.Tensor,
    offsets: torch.Tensor,
    batch_size: int,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sums of ``weights[at]`` (weights [.., D], at int64 [L], times ``scale`` [L]) per bag, float32 [B, F *
    D].

    Bags are feature-major as in a KJT, ``offsets`` int64 [F * B + 1]. Without samples: [0, D].
    """
    dim = weights.shape[1]
    at, offsets = at.to(weights.device), offsets.to(weights.device)
    if not batch_size:
        return weights.new_zeros((0, dim))
    features = (len(offsets) - 1) // batch_size
    if len(at):
        scale = None if scale is None else scale.to(weights.device)
        sums = torch.nn.functional.embedding_bag(
            at, weights, offsets[:-1], mode="sum", per_sample_weights=scale
        )
    else:
        sums = weights.new_zeros((features * batch_size, dim))
    return sums.view(features, batch_size, dim).transpose(0, 1).reshape(batch_size, features * dim)


def evaluated(tables: TableSet, records: torch.Tensor) -> torch.Tensor:
    """What evaluations take as the weights of these ``records`` (float32 [n, width]), float32 [n, D]: the
    averages while these are shown."""
    weights, own = records[:, : tables.dim], tables.optimizer
    if own.average is None or not own.clock.shows:
        return weights
    return own.average.averages(weights, records[:, tables.dim :], own.clock.points[1])


def updated(
    optimizer: TableOptimizer,
    records: torch.Tensor,
    gradients: torch.Tensor,
    rate: float | None = None,
    points: Points | None = None,
) -> torch.Tensor:
    """``records`` (float32 [n, D + state]) after one optimizer step with ``gradients`` (float32 [n, D]).

    ``rate``, ``points``: those of the step that has made the gradients, where this is called later; None:
    those in force.

    The formulas are FBGEMM's: Adagrad adds the squared gradient to the state, row-wise Adagrad the mean
    of its squares, and both divide by the root of the new state plus eps. Those that FBGEMM does not fuse are
    in ``recpipe.tables.updating``.
    """
    rate = optimizer.rate.value if rate is None else rate
    if not optimizer.fused:
        return stepped(optimizer, rate, records, gradients, points)
    dim = gradients.shape[1]
    weights, state = records[:, :dim], records[:, dim:]
    if optimizer.name == "sgd":
        return weights - rate * gradients
    squares = gradients * gradients
    grown = state + (squares if optimizer.name == "adagrad" else squares.mean(dim=1, keepdim=True))
    step = rate * gradients / (grown.sqrt() + optimizer.eps)
    return torch.cat((weights - step, grown), dim=1)
