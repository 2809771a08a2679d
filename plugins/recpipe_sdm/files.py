"""A table's file in a package, read in parts: tables may be larger than memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

ROWS, PLACES = "rows", "places"
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class RowFile:
    """A row for each id. Where rows were pruned, an id that has none has a row of zeros here."""

    file: Path
    ids: int
    row_bytes: int = field(init=False)
    places: NDArray[np.int32] | None = field(init=False)
    """For each id its row among those kept, or -1; None: each has its own."""

    def __post_init__(self) -> None:
        with safe_open(self.file, framework="np") as opened:
            width = opened.get_slice(ROWS).get_shape()[1]
            pruned = PLACES in opened.keys()  # noqa: SIM118
            places = opened.get_tensor(PLACES) if pruned else None
        object.__setattr__(self, "row_bytes", width)
        object.__setattr__(self, "places", places)

    @property
    def kept(self) -> NDArray[np.int64] | None:
        """The ids that have a row; None: all of them."""
        return None if self.places is None else np.flatnonzero(self.places >= 0)

    def rows(self, start: int, stop: int) -> Bytes:
        """The rows of ids ``start`` to ``stop`` (excluded), uint8 [n, row_bytes]."""
        if self.places is None:
            return self.stored(start, stop)
        at = self.places[start:stop]
        live = at >= 0
        found = np.zeros((len(at), self.row_bytes), np.uint8)
        if live.any():
            low, high = int(at[live].min()), int(at[live].max()) + 1
            found[live] = self.stored(low, high)[at[live] - low]
        return found

    def stored(self, start: int, stop: int) -> Bytes:
        """Rows of the file, uint8 [n, row_bytes]."""
        # Opened anew for these rows: what has been read stays in memory until the file is closed.
        with safe_open(self.file, framework="np") as opened:
            found: Bytes = opened.get_slice(ROWS)[start:stop]
        return found
