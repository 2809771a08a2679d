"""Validation of columns (the first bad row named, or bad rows left out and counted) and of batches' ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.data.dataset import Schema, SparseFeature
from recpipe.errors import DataError, shown

REMEDY = "correct it, or leave bad rows out with data.on_bad_row=skip"


class RowChecks:
    """Checks of one block of n rows whose first one is row ``first_row`` (from 1) of ``file``."""

    def __init__(self, file: Path, first_row: int, size: int) -> None:
        self.file, self.first_row = file, first_row
        self.good: NDArray[np.bool_] = np.ones(size, bool)
        self._worst: tuple[int, str] | None = None

    def require(
        self, valid: NDArray[np.bool_], column: str, value_of: Callable[[int], object], remedy: str
    ) -> None:
        """Mark the rows where ``valid`` (bool [n]) is false as bad; ``value_of(row)`` is what a row holds."""
        self.good &= valid
        if valid.all():
            return
        index = int(np.argmin(valid))
        if self._worst is None or index < self._worst[0]:
            self._worst = (index, f"column {shown(column)}: {shown(value_of(index))} {remedy}")

    def require_finite(
        self, values: NDArray[np.floating], column: str, value_of: Callable[[int], object]
    ) -> NDArray[np.float32]:
        """``values`` [n] as float32, in which dense values are kept; bad where that is no finite number."""
        with np.errstate(over="ignore"):
            stored = values.astype(np.float32)
        finite = np.isfinite(values)
        self.require(finite, column, value_of, "is not a finite number")
        beyond = "is beyond float32, in which dense values are kept"
        self.require(np.isfinite(stored) | ~finite, column, value_of, beyond)
        return stored

    def finish(self, skip: bool) -> int:
        """How many rows are bad; ``DataError`` for the first of them unless ``skip``."""
        if self._worst is not None and not skip:
            index, message = self._worst
            raise DataError(f"{self.file}, row {self.first_row + index}, {message}; {REMEDY}")
        return int(len(self.good) - self.good.sum())


def require_ids(sparse: KeyedJaggedTensor, features: Sequence[SparseFeature]) -> None:
    """Raise ``DataError`` on an id in ``sparse`` (host memory) that is not in its table.

    FBGEMM would either look up row 0 in its place or read what is not its memory.
    """
    ids, batch = sparse.values().numpy(), sparse.stride()
    if not len(ids):
        return
    bounds = sparse.offsets().numpy()[::batch]
    used = np.flatnonzero(np.diff(bounds))
    rows_of = {feature.name: feature.rows for feature in features}
    names = [sparse.keys()[feature] for feature in used]
    lowest, highest = (f.reduceat(ids, bounds[used]) for f in (np.minimum, np.maximum))
    for name, low, high in zip(names, lowest, highest, strict=True):
        if low < 0 or high >= rows_of[name]:
            raise unknown_id(low if low < 0 else high, name, rows_of[name])


def require_known_ids(sparse: KeyedJaggedTensor, schema: Schema | None) -> None:
    """``require_ids`` where the tables' rows are known here; else the tables check them."""
    if schema is not None:
        require_ids(sparse, schema.sparse)


def unknown_id(found: int, feature: str, rows: int) -> DataError:
    """The error of an id that is not in its table of ``rows``."""
    return DataError(
        f"id {found} of feature {feature} is not in its table of {rows} rows; raise the table's rows or "
        "hash the ids"
    )
