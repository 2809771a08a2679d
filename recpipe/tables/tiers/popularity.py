"""Selects popular rows by access counts; equal counts give the same result, also for ties."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recpipe.plugin.policy import RowIds


def top_rows(counts: NDArray[np.int32], size: int, resident: RowIds | None = None) -> RowIds:
    """The ``size`` rows with the highest counts above 0, as global row numbers, int64, sorted.

    Of rows with equal counts, those that are already ``resident`` come first (moving a row for nothing costs
    two transfers), then lower row numbers.
    """
    counted = np.flatnonzero(counts)
    if len(counted) <= size:
        return counted
    if size == 0:
        return counted[:0]
    values = counts[counted]
    least = np.partition(values, len(values) - size)[len(values) - size]
    certain = counted[values > least]
    tied = counted[values == least]
    if resident is not None:
        tied = tied[np.argsort(~np.isin(tied, resident), kind="stable")]
    return np.sort(np.concatenate((certain, tied[: size - len(certain)])))
