"""Which rows are in DRAM, under one budget of bytes for all tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recpipe.plugin import UserError


@dataclass(frozen=True)
class Size:
    """A table's rows, and the bytes of each."""

    rows: int
    row_bytes: int

    @property
    def nbytes(self) -> int:
        """The bytes of all rows."""
        return self.rows * self.row_bytes


def index_bytes(adapts: bool) -> int:
    """DRAM for each row of a table on the SSD: its slot and, for LFU admission, how often it was looked
    up."""
    return 8 if adapts else 4


def hot_rows(
    sizes: Mapping[str, Size], counts: Mapping[str, NDArray[np.int64]], budget: int, adapts: bool = True
) -> dict[str, NDArray[np.int64]]:
    """The rows of each table to keep in DRAM at first, sorted, int64.

    ``sizes``: the tables on the SSD. ``counts``: how often each row was looked up, int64 [rows]; a table
    without them counts as one whose rows are looked up alike. ``budget``: bytes for rows and index. Rows with
    the most lookups a byte come first (SDM, section 4: bandwidth density). ``UserError`` if the budget is
    smaller than the index.
    """
    left = budget - index_bytes(adapts) * sum(size.rows for size in sizes.values())
    if left < 0:
        total = sum(size.rows for size in sizes.values())
        raise UserError(
            f"plugins.sdm.dram leaves {budget:,} bytes for tables on the SSD: the index of {total:,} rows "
            f"alone takes {budget - left:,}; give more, or fewer tables (plugins.sdm.tables)"
        )
    density = [_density(size, counts.get(name)) for name, size in sizes.items()]
    widths = [np.full(size.rows, size.row_bytes, np.int64) for size in sizes.values()]
    order = np.argsort(-np.concatenate(density), kind="stable")
    fits = np.cumsum(np.concatenate(widths)[order]) <= left
    chosen = np.zeros(len(order), bool)
    chosen[order[fits]] = True
    return dict(zip(sizes, _by_table(chosen, [size.rows for size in sizes.values()]), strict=True))


def _density(size: Size, counts: NDArray[np.int64] | None) -> NDArray[np.float64]:
    """Lookups a byte of each row."""
    if counts is None:
        return np.full(size.rows, 1 / size.nbytes)
    return (counts + 0.0) / max(1, int(counts.sum())) / size.row_bytes


def _by_table(chosen: NDArray[np.bool_], rows: Sequence[int]) -> list[NDArray[np.int64]]:
    return [np.flatnonzero(part) for part in np.split(chosen, np.cumsum(rows)[:-1])]
