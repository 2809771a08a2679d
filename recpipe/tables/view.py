"""A read-only view of a model's tables for plugins: which rows are resident, and how far rows move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recpipe.errors import UserError
from recpipe.plugin.policy import RowIds
from recpipe.tables.capabilities import ShowsRows
from recpipe.tables.collection import TableCollection
from recpipe.tables.groups import ModelTables

Weights = NDArray[np.float32]


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


class RowView:
    """The rows of all tables after the last batch, numbered over all tables as by ``Context.lookups``.

    Use it in the training thread between two batches, for example in a Lightning callback after a batch.
    Every trainer sees the same. ``UserError`` for tables that do not show their rows: some of plugins' own,
    and sharded ones.
    """

    def __init__(self, tables: ModelTables, collections: Sequence[TableCollection]) -> None:
        self._tables, self._collections = tables, tuple(collections)
        self._bases = tables.bases
        self.rows = tables.total_rows
        """The number of rows of all tables."""
        self.dim = max(group.tables.dim for group in tables.groups)
        """The largest dimension of a table."""

    @property
    def slots(self) -> int:
        """How many rows can be resident; all rows if there are no tiers."""
        return sum(group.slots for group in self._groups())

    @property
    def resident_count(self) -> int:
        """How many rows are resident, at no cost."""
        return sum(group.resident_count for group in self._groups())

    def resident(self) -> RowIds:
        """The resident rows, sorted, int64 [n]."""
        pairs = zip(self._groups(), self._bases[:-1], strict=True)
        return np.concatenate([group.resident_rows() + base for group, base in pairs])

    def mark(self, rows: RowIds | None = None) -> Mark:
        """Copy the current weights of distinct, sorted, resident ``rows`` (None: all resident rows)."""
        rows = self.resident() if rows is None else rows
        weights = np.zeros((len(rows), self.dim), np.float32)
        cuts = np.searchsorted(rows, self._bases)
        for number, group in enumerate(self._groups()):
            mine = slice(int(cuts[number]), int(cuts[number + 1]))
            dim = self._tables.groups[number].tables.dim
            found = group.resident_weights(rows[mine] - self._bases[number])
            weights[mine, :dim] = found.cpu().numpy()
        return Mark(rows, weights)

    def moved(self, mark: Mark) -> tuple[RowIds, Weights]:
        """The rows of ``mark`` that are resident now, sorted, and how far each has moved since: the largest
        change in any dimension, float32 [n]."""
        still = np.isin(mark.rows, self.resident(), assume_unique=True)
        return moved(mark, self.mark(mark.rows[still]))

    def _groups(self) -> list[ShowsRows]:
        shown = [collection.offers(ShowsRows) for collection in self._collections]
        for found, collection in zip(shown, self._collections, strict=True):
            if found is None:
                raise UserError(
                    f"a plugin asks which rows are resident, which {type(collection).__name__} does not show"
                    ": drop that plugin, or what keeps these tables another way"
                )
        return [found for found in shown if found is not None]
