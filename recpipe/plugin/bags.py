"""The rows that a batch looks up, bag by bag, and the types in which rows and slots are numbered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

RowIds = NDArray[np.int64]
"""Numbers of rows: of one group's, or of all tables'."""
Slots = NDArray[np.int32]
"""Numbers of a group's resident slots."""
Offsets = NDArray[np.int64]
"""Where each bag begins, and at the end where the last one ends: feature-major, int64 [F * B + 1]."""
Weights = NDArray[np.float32]


@dataclass
class Bags:
    """A batch's lookups: bag i is ``rows[offsets[i] : offsets[i + 1]]``, feature-major.

    Rows are numbered over all tables, in the order of ``Context.tables``; within a group of tables where the
    lookups are those of one group (``TierParts.lookups``).
    """

    rows: RowIds
    """int64 [L]."""
    offsets: Offsets
    """int64 [F * B + 1]."""
    batch_size: int
    weights: Weights | None = None
    """Weights of the lookups, float32 [L]; None: each counts once."""
    times: ClassVar[None] = None
    """How often each row is looked up, where a GPU has made the rows distinct; here each lookup is there
    itself."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def indices(self) -> RowIds:
        """``rows``, by the name that lookups of one group had before API 2.9."""
        return self.rows

    def apart(self) -> Bags:
        """The same lookups, each as a bag of its own, with one feature."""
        lookups = len(self.rows)
        return Bags(self.rows, np.arange(lookups + 1), lookups)

    def permuted(self, order: NDArray[np.int64]) -> Bags:
        """The bags of the samples in ``order`` (int64 [n]), in that order."""
        places, offsets = places_of(self.offsets, self.batch_size, order)
        weights = None if self.weights is None else self.weights[places]
        return Bags(self.rows[places], offsets, len(order), weights)


IndexBags = Bags
"""The name of ``Bags`` before API 2.9, where lookups are those of one group of tables."""


def places_of(
    offsets: NDArray[np.int64], batch_size: int, samples: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The positions of these samples' ids (``samples`` int64 [n]) among the ids of a batch, feature by
    feature, int64 [L], and the offsets of their bags.

    ``offsets``: of all bags of the batch, feature by feature.
    """
    firsts = np.arange(0, len(offsets) - 1, max(1, batch_size))
    bags = (firsts[:, None] + samples[None, :]).ravel()
    if offsets[-1] == len(offsets) - 1 and np.array_equal(offsets, np.arange(len(offsets))):
        return bags, np.arange(len(bags) + 1)  # one id in each bag
    lengths = np.diff(offsets)[bags]
    new = np.concatenate(([0], np.cumsum(lengths)))
    return np.arange(new[-1]) + np.repeat(offsets[bags] - new[:-1], lengths), new


def distinct(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Distinct ``rows``, sorted. numpy's own ``unique`` hashes integers, 20 times slower than its sort, which
    is twice as fast on 32 bits."""
    small = len(rows) and rows.max() <= np.iinfo(np.int32).max and rows.min() >= 0
    ordered = np.sort(rows.astype(np.int32) if small else rows)
    first = np.ones(len(ordered), bool)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return ordered[first].astype(np.int64, copy=False)
