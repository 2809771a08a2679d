"""How often each id is looked up: a power law per table, fitted to published reuse histograms.

In a table of R rows the density of the (continuous) popularity rank x in [1, R + 1) is proportional to
(x + q)^-s (Zipf-Mandelbrot), and the rank is its whole part. Tables take one of three classes of (s, q) in
turn. Constants and table sizes are fitted to Meta's histogram of a batch of 65,536 samples over 856 tables
(2021) in facebookresearch/dlrm_datasets (MIT): the share of distinct ids and of lookups for each reuse count
up to 1, 2, 4, ... 32768. For 65,536 samples the generator stays within 0.017 of the published CDF over ids
and within 0.022 of the one over lookups, with 6.8 lookups per distinct id (published: 6.9). For the 2022
histogram (131,072 samples, 788 tables), which was not used in the fit, it is 0.087 and 0.045.
"""

from __future__ import annotations

from math import gcd

import numpy as np
from numpy.typing import NDArray

# 26 tables of mixed sizes, 980,290 rows in all.
TABLE_ROWS = (
    *(4000, 900, 200000, 120000, 600, 100, 12000, 1500, 3, 40000, 6000, 180000, 3000),
    *(50, 15000, 140000, 12, 6000, 2500, 200, 160000, 25, 400, 50000, 8000, 30000),
)
# (s, b) of each class, q = R^b; None: q = 0.
CLASSES: tuple[tuple[float, float | None], ...] = ((1.33, 0.735), (0.89, None), (2.6, 0.745))


class Popularity:
    """Draws ids for F tables at once; the arithmetic broadcasts over a last axis of length F."""

    def __init__(self, rows: NDArray[np.int64], first_class: NDArray[np.int64]) -> None:
        classes = [CLASSES[index % len(CLASSES)] for index in first_class]
        self.rows = rows.astype(np.int64)
        shift = [0.0 if b is None else float(r) ** b for (_, b), r in zip(classes, rows, strict=True)]
        self._shift = np.array(shift)
        self._power = np.array([1.0 - s for s, _ in classes])
        self._low = (1.0 + self._shift) ** self._power
        self._span = (rows + 1.0 + self._shift) ** self._power - self._low
        self._inverse = 1.0 / self._power
        self._step = np.array([_coprime(int(r)) for r in rows], np.int64)
        self._start = (self.rows * 7) // 10

    def ranks(self, uniform: NDArray[np.float64]) -> NDArray[np.int64]:
        """Popularity ranks from 0 (the most popular id) for uniform numbers [..., F] in [0, 1)."""
        place = uniform * self._span
        place += self._low
        np.log(place, out=place)
        place *= self._inverse
        np.exp(place, out=place)
        place -= self._shift
        ranks: NDArray[np.int64] = place.astype(np.int64)
        ranks -= 1
        np.clip(ranks, 0, self.rows - 1, out=ranks)
        return ranks

    def ids(self, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Ids of ranks, by an affine permutation of the rows, so that popular ids are scattered."""
        ids = ranks * self._step
        ids += self._start
        ids %= self.rows
        return ids


def _coprime(rows: int) -> int:
    """A multiplier near the golden section of ``rows`` that has no divisor in common with it."""
    step = max(1, round(rows * 0.6180339887))
    while gcd(step, rows) != 1:
        step += 1
    return step
