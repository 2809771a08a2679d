"""Checks columns (naming the first bad row, or counting and leaving out bad rows) and batches' ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.errors import BadRow, DataError, shown


class RowChecks:
    """Checks of one block of n rows whose first one is row ``first_row`` (from 1) of ``file``."""

    def __init__(self, file: Path, first_row: int, size: int) -> None:
        self.file, self.first_row = file, first_row
        self.good: NDArray[np.bool_] = np.ones(size, bool)
        self._worst: tuple[int, str] | None = None

    def require(
        self, valid: NDArray[np.bool_], column: str, value_of: Callable[[int], object], remedy: str
    ) -> None:
        """Mark rows where ``valid`` (bool [n]) is false as bad; ``value_of(row)`` returns the row's value."""
        self.good &= valid
        if valid.all():
            return
        index = int(np.argmin(valid))
        if self._worst is None or index < self._worst[0]:
            self._worst = (index, f"column {shown(column)}: {shown(value_of(index))} {remedy}")

    def require_finite(
        self, values: NDArray[np.floating], column: str, value_of: Callable[[int], object]
    ) -> NDArray[np.float32]:
        """``values`` [n] as float32, the type of dense values; rows whose value is not finite are bad."""
        with np.errstate(over="ignore"):
            stored = values.astype(np.float32)
        finite = np.isfinite(values)
        self.require(finite, column, value_of, "is not a finite number")
        beyond = "is beyond float32, in which dense values are kept"
        self.require(np.isfinite(stored) | ~finite, column, value_of, beyond)
        return stored

    def finish(self, skip: bool) -> int:
        """How many rows are bad; ``BadRow`` for the first of them unless ``skip``."""
        if self._worst is not None and not skip:
            index, message = self._worst
            raise BadRow(f"{self.file}, row {self.first_row + index}, {message}")
        return int(len(self.good) - self.good.sum())


def require_ids(sparse: KeyedJaggedTensor, rows: Sequence[int] | NDArray[np.integer]) -> None:
    """Raise ``DataError`` for an id in ``sparse`` that is not in its table. ``rows``: the number of rows of
    each feature's table, in the features' order. Ids on a GPU are copied, which waits for it.

    FBGEMM would either look up row 0 instead or read foreign memory.
    """
    ids, batch = sparse.values().cpu().numpy(), sparse.stride()
    if not len(ids):
        return
    bounds, limits = sparse.offsets().cpu().numpy()[::batch], np.asarray(rows, np.uint64)
    used = np.flatnonzero(bounds[1:] > bounds[:-1])
    if ids.dtype.kind == "f":
        ids = ids.astype(np.int64)  # as the lookup does
    # Below 0, a number is above all rows if its bits are read as one without a sign: one pass finds both.
    largest = np.maximum.reduceat(ids.view(f"u{ids.itemsize}"), bounds[used])
    wrong = used[largest >= limits[used]]
    if len(wrong):
        feature = int(wrong[0])
        own = ids[bounds[feature] : bounds[feature + 1]]
        low, high = own.min(), own.max()
        raise unknown_id(low if low < 0 else high, sparse.keys()[feature], int(limits[feature]))


def unknown_id(found: int, feature: str, rows: int) -> DataError:
    """The error for an id that is not in its table of ``rows`` rows."""
    return DataError(
        f"id {found} of feature {feature} is not in its table of {rows} rows; raise the table's rows or "
        "hash the ids"
    )
