"""Rows told apart by a column: by the values of a categorical one, by buckets of a numeric one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recpipe.answers.columns import has_columns, read_columns
from recpipe.answers.trained import Trained
from recpipe.data.schema import Schema
from recpipe.errors import DataError, UserError, nearest_or_all, shown

MISSING = "missing"


@dataclass(frozen=True)
class RowSlice:
    """The rows of one value or bucket, by their numbers among those scored."""

    name: str
    rows: NDArray[np.int64]


class Slicer:
    """Collects a column's values: 4 bytes a row, and its distinct values."""

    def __init__(self, column: str) -> None:
        self.column = column
        self._codes: dict[Any, int] = {}
        self._parts: list[NDArray[Any]] = []
        self._numeric: bool | None = None

    def add(self, values: pa.Array, numeric: bool) -> None:
        """The next rows' values; ``numeric``: to be put into buckets."""
        self._numeric = numeric
        if numeric:
            filled = pc.fill_null(values.cast(pa.float64(), safe=False), np.nan)
            self._parts.append(np.asarray(filled.to_numpy(zero_copy_only=False), np.float32))
            return
        encoded = pc.dictionary_encode(values, null_encoding="encode")
        words = encoded.dictionary.to_pylist()
        codes = [self._codes.setdefault(word, len(self._codes)) for word in words]
        self._parts.append(np.array(codes, np.int32)[np.asarray(encoded.indices)])

    def slices(self, top: int) -> Iterator[RowSlice]:
        """The ``top`` most frequent values, then the rest as one; or as many buckets with about equally many
        rows."""
        values = np.concatenate(self._parts)
        return self._buckets(values, top) if self._numeric else self._frequent(values, top)

    def _frequent(self, codes: NDArray[np.int32], top: int) -> Iterator[RowSlice]:
        counts = np.bincount(codes, minlength=len(self._codes))
        words = list(self._codes)
        order = np.argsort(-counts, kind="stable")
        order = order[counts[order] > 0]
        for code in order[:top].tolist():
            word = words[code]
            yield RowSlice(MISSING if word is None else shown(word), np.flatnonzero(codes == code))
        rest = order[top:]
        if len(rest):
            yield RowSlice(f"{len(rest):,} other values", np.flatnonzero(np.isin(codes, rest)))

    def _buckets(self, values: NDArray[np.float32], top: int) -> Iterator[RowSlice]:
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
                yield RowSlice(f"[{low:g}, {high:g}{']' if last else ')'}", rows)
        missing = np.flatnonzero(np.isnan(values))
        if len(missing):
            yield RowSlice(MISSING, missing)


def slicer_of_files(trained: Trained, column: str, first: int, rows: int, rejected: int) -> Slicer | None:
    """The slicer with rows [``first``, ``first + rows``) of ``column`` as the files have it; None if the
    data has no such files, whose batches then have the values. ``rejected``: rows that were left out."""
    config = trained.cfg.data
    if not has_columns(config):
        return None
    if rejected:
        raise UserError(
            f"by={column}: {rejected:,} bad rows were left out of the data, so that the column cannot be "
            "matched; correct the file, and drop data.on_bad_row=skip"
        )
    slicer, at = Slicer(column), 0
    for block in read_columns(config, [column]):
        low, high = max(first - at, 0), min(first + rows - at, len(block))
        at += len(block)
        if low < high:
            values = block.column(0).slice(low, high - low).combine_chunks()
            values = values.chunk(0) if isinstance(values, pa.ChunkedArray) else values
            slicer.add(*_typed(trained, column, values))
    return slicer


def _typed(trained: Trained, column: str, values: pa.Array) -> tuple[pa.Array, bool]:
    """``values``, and whether they are numbers for buckets: a dense column, or one of floats."""
    kind = values.type
    if pa.types.is_nested(kind):
        raise DataError(f"by={shown(column)}: the column holds {kind}, not one value a row; choose another")
    columns = trained.trained_on.columns
    dense = columns is not None and column in columns.dense
    if pa.types.is_dictionary(kind):
        values = values.dictionary_decode()
    if dense and pa.types.is_string(kind):  # Criteo's text
        return values.cast(pa.float64()), True
    return values, dense or pa.types.is_floating(kind)


def add_of_batch(slicer: Slicer, batch: Any, schema: Schema | None) -> None:
    """Add a batch's own values of the column: rows of a table, or dense values as the model sees them."""
    name = slicer.column
    if schema is None:
        raise DataError(
            f"by={shown(name)}: the batches are of a type of the caller's own, whose columns are not known"
        )
    dense, sparse = schema.dense, [feature.name for feature in schema.sparse]
    if name in dense:
        slicer.add(pa.array(batch.dense[:, dense.index(name)].cpu().numpy()), True)
    elif name in sparse:
        ids = batch.sparse[name]
        if not bool((ids.lengths() == 1).all()):
            raise DataError(f"by={shown(name)}: the column holds lists, not one value a row; choose another")
        slicer.add(pa.array(ids.values().cpu().numpy()), False)
    else:
        raise DataError(f"by={shown(name)}: no such column; {nearest_or_all(name, [*dense, *sparse])}")
