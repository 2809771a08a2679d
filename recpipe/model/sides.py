"""Columns of batches beside which predictions are judged: that of groups, and those of slices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.data.dataset import Dataset
from recpipe.data.learned import FIRST
from recpipe.errors import DataError, nearest_or_all, shown
from recpipe.model.config import MetricsConfig
from recpipe.plugin.batch import Batch

WITHOUT = -1
"""The value of a sample that has none."""
_MISSING_ROW, _OTHERS_ROW = 0, 1
"""The rows of missing ids, and of ids without a row of their own."""
MISSING = "missing"
"""The slice of samples without a value."""


@dataclass(frozen=True)
class RowSlice:
    """The samples of one value or bucket, by their numbers."""

    name: str
    rows: NDArray[np.int64]


class Sides:
    """Reads ``columns``, pairs of the key that names one and its name, from batches.

    ``dataset``: whose batches they are; None: it is not known. ``DataError`` for a column that its schema
    does not have.
    """

    def __init__(self, columns: Sequence[tuple[str, str]], dataset: Dataset | None) -> None:
        self.columns = columns
        schema = None if dataset is None else dataset.schema
        self._dense = list(schema.dense) if schema is not None else []
        sparse = schema.sparse if schema is not None else ()
        self._without = _rows_of_none(dataset)
        """The rows of each feature that stand for no value of its own."""
        self._ids = _ids_of_vocabularies(dataset)
        self._words = None if dataset is None else dataset.words
        names = [*self._dense, *(feature.name for feature in sparse)]
        for key, name in columns if schema is not None else ():
            if name not in names:
                raise DataError(f"{key}={shown(name)}: no such column; {nearest_or_all(name, names)}")

    @classmethod
    def of_metrics(
        cls, asked: MetricsConfig, dataset: Dataset | None, further: Sequence[tuple[str, str]] = ()
    ) -> Sides:
        """Those that ``asked`` names, the group's first, and ``further`` ones."""
        own = [] if asked.group is None else [("metrics.group", asked.group)]
        return cls([*own, *(("metrics.slices", name) for name in asked.slices), *further], dataset)

    def of(self, batch: Any) -> torch.Tensor:
        """The values of ``batch`` in host memory, int64 [B, columns]: rows of tables, or the bits of dense
        values; ``WITHOUT`` where there are none. ``DataError`` for lists."""
        if not isinstance(batch, Batch):
            key, name = self.columns[0]
            raise DataError(
                f"{key}={shown(name)}: the batches are of a type of the caller's own, whose columns are not "
                "known"
            )
        return torch.stack([self._column(batch, key, name) for key, name in self.columns], dim=1)

    def _column(self, batch: Batch, key: str, name: str) -> torch.Tensor:
        if name in self._dense:
            values = batch.dense[:, self._dense.index(name)].cpu() + 0.0  # of -0 too
            bits = values.view(torch.int32).long() & 0xFFFFFFFF
            return torch.where(values.isnan(), WITHOUT, bits)
        if name not in batch.sparse.keys():  # noqa: SIM118
            raise DataError(
                f"{key}={shown(name)}: no such column; {nearest_or_all(name, batch.sparse.keys())}"
            )
        ids = batch.sparse[name]
        values, lengths = ids.values().cpu().long(), ids.lengths().cpu()
        if bool((lengths > 1).any()):
            raise DataError(
                f"{key}={shown(name)}: the column holds lists, not one value a row; choose another"
            )
        found = torch.full((len(lengths),), WITHOUT)
        found[lengths == 1] = values
        for row in self._without.get(name, ()):
            found[found == row] = WITHOUT
        return found

    def is_dense(self, name: str) -> bool:
        """Whether a column is a dense one."""
        return name in self._dense

    def slices(self, values: torch.Tensor, column: int, top: int) -> list[RowSlice]:
        """The slices by one of the columns of ``values`` int64 [N, columns]; those of a vocabulary of numbers
        have its ids as names, others the words that the input's files have for them, or else their rows of
        the table."""
        own, name = values[:, column].numpy(), self.columns[column][1]
        if self.is_dense(name):
            bits = own.astype(np.uint32).view(np.float32)
            return [*buckets(np.where(own == WITHOUT, np.float32("nan"), bits), top)]
        rows, codes = np.unique(own, return_inverse=True)
        words: list[Any] = [None if row == WITHOUT else row for row in rows.tolist()]
        ids = self._ids.get(name)
        if ids is not None:
            words = [None if row is None else int(ids[row - FIRST]) for row in words]
        elif self._words is not None:
            alone = most_frequent(codes, len(rows))[:top]
            found = self._words.of(name, [words[code] for code in alone if words[code] is not None])
            words = [found.get(row, row) for row in words]
        return [*by_value(codes, words, top)]

    def told(
        self, values: torch.Tensor, asked: MetricsConfig, judged: Callable[[torch.Tensor], dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """What ``judged`` tells of the rows, int64, of each slice of each of ``asked.slices``."""
        first = 0 if asked.group is None else 1
        return [
            {
                "column": name,
                "slices": [
                    {"value": part.name, **judged(torch.from_numpy(part.rows))}
                    for part in self.slices(values, first + number, asked.slice_values)
                ],
            }
            for number, name in enumerate(asked.slices)
        ]


def _rows_of_none(dataset: Dataset | None) -> dict[str, tuple[int, ...]]:
    """The rows of features that stand for no value of its own: that of missing ids and, where not all ids
    have one, that of the others."""
    if dataset is None or dataset.schema is None:
        return {}
    both, prepared = (_MISSING_ROW, _OTHERS_ROW), dataset.preparation
    found: dict[str, tuple[int, ...]] = {}
    if prepared is not None and prepared.features is not None:
        of_rule: dict[str, tuple[int, ...]] = {"modulo": (), "rows": (), "vocabulary": both}
        found = {own.name: of_rule.get(str(own.ids), (_MISSING_ROW,)) for own in prepared.features.sparse}
    elif prepared is not None and prepared.ids == "hashed":
        found = {own.name: (_MISSING_ROW,) for own in dataset.schema.sparse}
    return found | {own.name: both for own in dataset.schema.sparse if own.growth is not None}


def _ids_of_vocabularies(dataset: Dataset | None) -> dict[str, NDArray[np.int64]]:
    """The ids of features with a vocabulary, in the order of their rows from ``FIRST`` on; of text it has
    hashes alone."""
    prepared = None if dataset is None else dataset.preparation
    if prepared is None or prepared.features is None or prepared.learned is None:
        return {}
    found = {
        own.name: prepared.learned.keys(own.table_name)
        for own in prepared.features.sparse
        if own.ids == "vocabulary" and not own.of and own.type in ("auto", "integer")
    }
    return {name: ids for name, ids in found.items() if len(ids)}


def most_frequent(codes: NDArray[Any], count: int) -> NDArray[np.intp]:
    """Which of ``count`` numbers are among ``codes`` [N], those that come most first."""
    counts = np.bincount(codes, minlength=count)
    order = np.argsort(-counts, kind="stable")
    return order[counts[order] > 0]


def by_value(codes: NDArray[Any], words: Sequence[Any], top: int) -> Iterator[RowSlice]:
    """The ``top`` most frequent of ``words``, whose numbers ``codes`` [N] are, then the rest as one; None is
    no value."""
    order = most_frequent(codes, len(words))
    for code in order[:top].tolist():
        word = words[code]
        yield RowSlice(MISSING if word is None else shown(word), np.flatnonzero(codes == code))
    rest = order[top:]
    if len(rest):
        yield RowSlice(f"{len(rest):,} other values", np.flatnonzero(np.isin(codes, rest)))


def buckets(values: NDArray[np.float32], top: int) -> Iterator[RowSlice]:
    """At most ``top`` buckets of ``values`` [N] with about equally many each, and those that are NaN."""
    known = values[~np.isnan(values)]
    if len(known):
        edges = np.unique(np.quantile(known, np.linspace(0, 1, top + 1)[1:-1])).astype(np.float32)
        edges = edges[edges > known.min()]
        which = np.searchsorted(edges, values, side="right")
        bounds = [float(known.min()), *edges.tolist(), float(known.max())]
        for number in range(len(edges) + 1):
            low, high = bounds[number], bounds[number + 1]
            last = number == len(edges)
            rows = np.flatnonzero((which == number) & ~np.isnan(values))
            if len(rows):
                yield RowSlice(f"[{low:g}, {high:g}{']' if last else ')'}", rows)
    missing = np.flatnonzero(np.isnan(values))
    if len(missing):
        yield RowSlice(MISSING, missing)
