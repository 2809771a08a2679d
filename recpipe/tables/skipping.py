"""Leaves rows out of updates for a skipper, in tables whose optimizer is fused into their backward pass.

FBGEMM updates every row that was looked up and cannot leave some out. So a lookup's backward pass first
computes the gradient of each distinct row and asks the skipper. If all rows are kept, it goes on as usual.
Otherwise the lookups of the kept rows are made once more, and their backward pass, with the same gradient of
the bags, makes the update. A row's update depends on its own lookups alone, so it has the same bits as
without a skipper.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from recpipe.plugin.bags import Bags, RowIds
from recpipe.plugin.calls import Owned
from recpipe.plugin.skipper import RowFilter, Skipper
from recpipe.tables.rows import RowBags

RowsOf = Callable[[NDArray[np.int64], NDArray[np.int64]], RowIds]
"""Maps the indices that a TBE looks up (int64 [L], feature by feature) and their number per feature (int64
[F]) to rows numbered in their group."""


class Skipping(RowFilter):
    """A skipper's ``update``, called by one thread at a time."""

    def __init__(self, skipper: Owned[Skipper]) -> None:
        self._skipper = skipper
        self._one_at_a_time = threading.Lock()

    def of_group(self, base: int) -> RowFilter:
        """The filter of the group of tables whose row 0 has the number ``base`` among all tables' rows."""
        return FilterWithin(self, np.array([0]), np.array([base]))

    def stay(self, rows: RowIds, gradients: torch.Tensor) -> torch.Tensor | None:
        """Which of ``rows``, numbered over all tables, to update; None: all. ``PluginError`` if the answer is
        wrong."""
        if not len(rows):
            return None

        def wrong(said: object) -> str | None:
            wanted = (torch.bool, (len(rows),))
            mask = isinstance(said, torch.Tensor) and (said.dtype, tuple(said.shape)) == wanted
            if mask or said is None:
                return None
            return (
                f": update() returned {answered(said)}; it must be a torch.Tensor of torch.bool "
                f"[{len(rows)}], one for each row, or None"
            )

        with self._one_at_a_time, torch.no_grad():
            said = self._skipper.call(Skipper.update, rows, gradients.detach().clone(), wrong=wrong)
        return None if said is None or bool(said.all()) else said.to(gradients.device)


class FilterWithin(RowFilter):
    """Asks the filter ``rows`` about rows that are numbered within some of its tables or shards: those of
    part i begin at ``bases[i]`` here and at ``firsts[i]`` there."""

    def __init__(self, rows: RowFilter, bases: RowIds, firsts: RowIds) -> None:
        self._rows, self._bases, self._shift = rows, bases[1:], firsts - bases

    def stay(self, rows: RowIds, gradients: torch.Tensor) -> torch.Tensor | None:
        return self._rows.stay(rows + self._shift[np.searchsorted(self._bases, rows, "right")], gradients)


def answered(said: object) -> str:
    """A description of a skipper's answer, for an error."""
    shape = getattr(said, "shape", None)
    return type(said).__name__ if shape is None else f"{getattr(said, 'dtype', '')} {list(shape)}"


def by_feature(bases: RowIds) -> RowsOf:
    """The mapping if indices are a table's own ids and row 0 of feature i's table has the number
    ``bases[i]``."""
    return lambda indices, counts: indices + np.repeat(bases, counts)


class FilteredLookups:
    """The ``forward`` of a TBE of so many ``features`` that updates only the rows that ``rows`` keeps.

    ``pooled``: whether it returns sums by bag, float32 [B, F * D], or a row for each id, [L, D].
    """

    def __init__(self, tbe: nn.Module, rows: RowFilter, rows_of: RowsOf, features: int, pooled: bool) -> None:
        self._forward = WeakMethod(tbe.forward)  # otherwise the TBE would reference itself and never be freed
        self.rows, self.rows_of, self.features, self.pooled = rows, rows_of, features, pooled

    def __call__(
        self, indices: torch.Tensor, offsets: torch.Tensor, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return self.look_up(indices, offsets, per_sample_weights)
        anchor = torch.zeros(0, device=indices.device, requires_grad=True)
        found: torch.Tensor = _Lookup.apply(anchor, self, indices, offsets, per_sample_weights)  # type: ignore[no-untyped-call]
        return found

    def look_up(
        self, indices: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        """The result of the TBE's own ``forward``."""
        forward = self._forward()
        assert forward is not None, "the TBE is being called"
        found: torch.Tensor = forward(indices, offsets, weights)
        return found


class _Lookup(torch.autograd.Function):
    """A lookup whose backward pass leaves rows out. The anchor makes autograd call it."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        tbe: FilteredLookups,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        weights: torch.Tensor | None,
    ) -> torch.Tensor:
        with torch.enable_grad():
            found = tbe.look_up(indices, offsets, weights)
        ctx.call = (tbe, found, indices, offsets, weights)
        return found.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, ...]:
        tbe, found, indices, offsets, weights = ctx.call
        starts = offsets.cpu().numpy().astype(np.int64, copy=False)
        size = (len(starts) - 1) // tbe.features
        counts = np.diff(starts[np.arange(tbe.features + 1) * size])
        rows = tbe.rows_of(indices.cpu().numpy().astype(np.int64, copy=False), counts)
        lookups = Bags(rows, starts, size, None if weights is None else weights.float().cpu().numpy())
        bags = RowBags.of(lookups if tbe.pooled else lookups.apart())
        dim = gradient.shape[1] // (tbe.features if tbe.pooled else 1)
        stay = tbe.rows.stay(bags.distinct, bags.gradients(gradient.contiguous(), dim))
        if stay is None:
            torch.autograd.backward(found, gradient)
            return None, None, None, None, None
        kept = stay[bags.which.to(stay.device)]
        if kept.any():
            ends = torch.cat((kept.new_zeros(1, dtype=offsets.dtype), kept.cumsum(0, dtype=offsets.dtype)))
            own = None if weights is None else weights[kept]
            with torch.enable_grad():
                again = tbe.look_up(indices[kept], ends[offsets], own)
            torch.autograd.backward(again, gradient if tbe.pooled else gradient[kept])
        return None, None, None, None, None
