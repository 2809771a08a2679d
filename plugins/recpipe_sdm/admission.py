"""LFU admission: which rows get the slots, by how often they are looked up while serving."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.plugin import RowIds

EVERY = 256
"""Batches from one change of the rows in DRAM to the next."""
MOST = 4096
"""Rows that change places at a time."""
HALVED = 64
"""After so many changes counts are halved: what was popular long ago leaves."""


class Admission:
    """Counts lookups (aged, int32 [rows]), and tells which rows should change places every so many batches.

    ``first``: lookups of each row before, int32 [rows], which count like those that follow.
    """

    def __init__(self, rows: int, every: int = EVERY, first: NDArray[np.int32] | None = None) -> None:
        self.every = every
        self._counts = torch.zeros(rows, dtype=torch.int32) if first is None else torch.from_numpy(first)
        self._ones = torch.ones(1, dtype=torch.int32)
        self._missed: list[RowIds] = []
        self._batches = self._changes = 0

    def count(self, rows: torch.Tensor, missed: RowIds, batches: int = 1) -> None:
        """Count the lookups of some batches, int64 [N], and note those of rows without a slot."""
        self._counts.index_add_(0, rows, self._ones.expand(len(rows)))
        self._missed.append(missed)
        self._batches += batches

    @property
    def due(self) -> bool:
        """Whether it is time for a change."""
        return self._batches >= self.every

    def exchange(self, place: NDArray[np.int32], slots: int) -> tuple[RowIds, RowIds]:
        """Rows that should get a slot, of those that were missed since the last change, and as many rows that
        should lose theirs, since they are looked up less. ``place``: of every row; below ``slots`` it is one.
        """
        missed, self._missed, self._batches = self._missed, [], 0
        counts = self._counts.numpy()
        if missed:
            entering = np.unique(np.concatenate(missed))
            at = place[entering]
            entering = entering[(at < 0) | (at >= slots)]
            entering = entering[np.argsort(-counts[entering], kind="stable")][: min(MOST, slots)]
        else:
            entering = np.empty(0, np.int64)
        leaving = self._least(place, slots, len(entering))
        gains = counts[entering] > counts[leaving]
        count = len(gains) if gains.all() else int(np.argmin(gains))
        self._changes += 1
        if self._changes % HALVED == 0:
            self._counts >>= 1
        return entering[:count], leaving[:count]

    def _least(self, place: NDArray[np.int32], slots: int, most: int) -> RowIds:
        """The ``most`` rows with slots that are looked up least, ascending."""
        if not most:
            return np.empty(0, np.int64)
        inside = np.flatnonzero((place >= 0) & (place < slots))
        counts = self._counts.numpy()[inside]
        least = np.argpartition(counts, most - 1)[:most]
        return inside[least[np.argsort(counts[least], kind="stable")]]

    @property
    def nbytes(self) -> int:
        """Memory of the counts."""
        return self._counts.nbytes
