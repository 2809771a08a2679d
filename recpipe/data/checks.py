"""Validation of columns: the first bad row named, or bad rows left out and counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from recpipe.errors import DataError

REMEDY = "correct it, or leave bad rows out with data.on_bad_row=skip"


class Values(Protocol):
    """A column to show a value of: a numpy or an Arrow array."""

    def __getitem__(self, index: int, /) -> Any: ...


class RowChecks:
    """Checks of one block of n rows whose first one is row ``first_row`` (from 1) of ``file``."""

    def __init__(self, file: Path, first_row: int, size: int) -> None:
        self.file, self.first_row = file, first_row
        self.good: NDArray[np.bool_] = np.ones(size, bool)
        self._worst: tuple[int, str] | None = None

    def require(self, valid: NDArray[np.bool_], column: str, values: Values, remedy: str) -> None:
        """Mark the rows where ``valid`` (bool [n]) is false as bad, ``values[row]`` being what they hold."""
        self.good &= valid
        if valid.all():
            return
        index = int(np.argmin(valid))
        if self._worst is None or index < self._worst[0]:
            value = values[index]
            self._worst = (index, f"column {column}: {value} {remedy}")

    def finish(self, skip: bool) -> int:
        """How many rows are bad; ``DataError`` for the first of them unless ``skip``."""
        if self._worst is not None and not skip:
            index, message = self._worst
            raise DataError(f"{self.file}, row {self.first_row + index}, {message}; {REMEDY}")
        return int(len(self.good) - self.good.sum())
