"""How unevenly lookups fall on rows: the share of lookups that the most popular rows have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TABLES = 5
"""How many tables have a curve of their own, the largest ones."""
_POINTS = 32


@dataclass
class Skew:
    """How much of the lookups the most popular rows have, from a sample of the training batches."""

    lookups: int
    """How many lookups were counted."""
    batches: int
    tables: Sequence[TableSkew]
    """All tables together, if there are several, then the largest ones."""


@dataclass
class TableSkew:
    """The ``share_of_lookups`` of a table's most popular rows, for several shares of its rows."""

    name: str | None
    """None: all tables together."""
    rows: int
    lookups: int
    share_of_rows: list[float]
    share_of_lookups: list[float]


def skew_of(
    counts: Mapping[str, NDArray[np.int64]], rows: Mapping[str, int], lookups: int, batches: int
) -> Skew | None:
    """The curves of all tables together and of the largest ones; None without lookups.

    ``counts``: for each table how often each of its rows was looked up (int64 [rows that occur]), in a sample
    of ``lookups`` from ``batches``. ``rows``: of each table.
    """
    if not lookups:
        return None
    largest = sorted(counts, key=lambda name: -rows[name])[:TABLES]
    curves = [_curve(name, counts[name], rows[name]) for name in largest if rows[name] > 1]
    if len(counts) > 1:
        together = np.concatenate(list(counts.values()))
        curves.insert(0, _curve(None, together, sum(rows[name] for name in counts)))
    return Skew(lookups, batches, curves)


def _curve(name: str | None, counts: NDArray[np.int64], rows: int) -> TableSkew:
    """Points at equal distances on a log scale of rows, from the most popular row to all of them."""
    first = np.cumsum(np.sort(counts)[::-1])
    at = np.unique(np.geomspace(1, rows, _POINTS).round().astype(np.int64))
    total = int(first[-1]) if len(first) else 0
    reached = first[np.minimum(at, len(first)) - 1] / total if total else np.zeros(len(at))
    return TableSkew(
        name,
        rows,
        total,
        [float(f"{share:.4g}") for share in at / rows],
        [float(f"{share:.4g}") for share in reached],
    )
