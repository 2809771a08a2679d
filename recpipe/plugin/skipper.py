"""Skippers: samples left out of a batch, and rows left out of an update; and the view of the rows by which
they decide."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from recpipe.plugin.bags import RowIds, Weights

if TYPE_CHECKING:
    import torch

    from recpipe.plugin.batch import Batch


class Skipper:
    """Leaves out what training does not need. Override ``keep``, ``update`` or both; a method that is not
    overridden costs nothing. A skipper that overrides neither is refused.

    Its plugin must declare that it alters EXACT_GRADIENT and, if it leaves samples out, SAMPLE_SET and
    BATCH_SIZE; core checks this. A skipper has no ``state_dict``: state that a resumed run needs belongs to a
    Lightning callback of the same plugin, which also has its turn between two batches.

    A complete example, which does not update rows with a small gradient::

        class SkipSmall(Skipper):
            def __init__(self, least: float) -> None:
                self.least = least

            def update(self, rows: RowIds, gradients: torch.Tensor) -> torch.Tensor:
                return gradients.norm(dim=1) >= self.least
    """

    def begin(self, view: RowView) -> None:
        """Called once, in the training thread, before the first batch is read and after a resumed run has
        loaded its tables.

        ``view`` shows which rows are resident and how far they move, then and between any two batches. Where
        tables are sharded, no rank could show that: a run with a skipper that overrides this is refused.
        """

    def keep(self, batch: Batch, number: int) -> NDArray[np.bool_] | None:
        """Which samples of ``batch`` to train, bool [B]; None: all.

        ``number``: batches that came before, over all epochs; a resumed run goes on counting. Called in the
        loader's thread, one batch ahead of training, after the ``batch`` chain. Every trainer calls it with
        the same whole batch and must get the same answer. If no sample would be left, the whole batch is
        trained.
        """
        return None

    def update(self, rows: RowIds, gradients: torch.Tensor) -> torch.Tensor | None:
        """Which of distinct ``rows`` (int64 [U], numbered over all tables) to update, bool [U]; None:
        all.

        ``gradients`` float32 [U, D]: the sum of each row's gradients over the batch's lookups on all
        trainers, before the fused optimizer's step; a copy, on the device that trains. The answer may be
        there or in host memory. Rows that are left out keep every bit, optimizer state included.

        Called in the backward pass, in whichever thread makes the update, one call at a time. There may be
        several calls for a group of tables, depending on its tiers and shards. A row of a batch is in one of
        these calls, or in two if the model also looks it up by ids of its own making; then the second answer
        counts. All trainers that hold replicas call it and must get the same answer, so decide from rows,
        gradients and what was decided between two batches, not from the order of the calls.
        """
        return None


def overrides(skipper: Skipper, method: Callable[..., Any]) -> bool:
    """Whether the class of ``skipper`` overrides ``method`` of ``Skipper``."""
    return getattr(type(skipper), method.__name__) is not method


@dataclass(frozen=True)
class Mark:
    """A copy of some rows at one moment; a checkpoint can hold it."""

    rows: RowIds
    """The rows, numbered over all tables, sorted, int64 [n]."""
    weights: Weights
    """Their weights without optimizer state, float32 [n, widest dimension]; shorter rows are padded with
    zeros."""


def moved(before: Mark, after: Mark) -> tuple[RowIds, Weights]:
    """The rows that are in both marks, sorted, and how far each has moved: the largest change in any
    dimension, float32 [n]."""
    rows, old, new = np.intersect1d(before.rows, after.rows, assume_unique=True, return_indices=True)
    return rows, np.abs(after.weights[new] - before.weights[old]).max(axis=1, initial=0.0)


class RowView(ABC):
    """The rows of all tables after the last batch, numbered over all tables as by ``Context.lookups``.

    Use it in the training thread between two batches, for example in a Lightning callback after a batch.
    Every trainer sees the same. ``UserError`` for tables that do not show their rows: some of plugins' own,
    and sharded ones.
    """

    rows: int
    """The number of rows of all tables."""
    dim: int
    """The largest dimension of a table."""

    @property
    @abstractmethod
    def slots(self) -> int:
        """How many rows can be resident; all rows if there are no tiers."""

    @property
    @abstractmethod
    def resident_count(self) -> int:
        """How many rows are resident, at no cost."""

    @abstractmethod
    def resident(self) -> RowIds:
        """The resident rows, sorted, int64 [n]."""

    @abstractmethod
    def mark(self, rows: RowIds | None = None) -> Mark:
        """Copy the current weights of distinct, sorted, resident ``rows`` (None: all resident rows)."""

    def moved(self, mark: Mark) -> tuple[RowIds, Weights]:
        """The rows of ``mark`` that are resident now, sorted, and how far each has moved since: the largest
        change in any dimension, float32 [n]."""
        still = np.isin(mark.rows, self.resident(), assume_unique=True)
        return moved(mark, self.mark(mark.rows[still]))


class RowFilter(ABC):
    """Decides which rows of one group of tables an update changes."""

    @abstractmethod
    def stay(self, rows: RowIds, gradients: torch.Tensor) -> torch.Tensor | None:
        """Which of distinct ``rows`` of the group to update, bool [U], or None: all. ``gradients`` float32
        [U, D]."""
