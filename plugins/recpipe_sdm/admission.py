"""LFU admission: which rows get the slots, by how often they are looked up while serving."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.plugin import RowIds

EVERY = 256
"""Batches from one change of the rows in DRAM to the next."""
MOST = 4096
"""Rows that change places at a time, so that no batch waits long."""
HALVED = 64
"""After so many changes counts are halved: what was popular long ago leaves."""


class Admission:
    """Counts lookups (aged, int32 [rows]) and exchanges rows in two steps.

    First the least looked up rows lose their slots; a change later, when no batch on its way refers to these
    slots any more, the most looked up ones of the rows that were missed get them.
    """

    def __init__(self, rows: int, every: int = EVERY) -> None:
        self.every = every
        self._counts = torch.zeros(rows, dtype=torch.int32)
        self._ones = torch.ones(1, dtype=torch.int32)
        self._missed: list[torch.Tensor] = []
        self._free: NDArray[np.int64] = np.empty(0, np.int64)
        self._batches = self._changes = 0

    def count(self, rows: torch.Tensor) -> None:
        """Count a batch's lookups, int64 [N]."""
        self._counts.index_add_(0, rows, self._ones.expand(len(rows)))
        self._batches += 1

    def missed(self, rows: torch.Tensor) -> None:
        """Note distinct rows that a batch missed."""
        self._missed.append(rows)

    @property
    def due(self) -> bool:
        """Whether it is time for a change."""
        return self._batches % self.every == 0

    def chosen(self) -> tuple[RowIds, NDArray[np.int64]]:
        """Missed rows for the slots that the last change has freed, most looked up first, and these slots."""
        missed = self._candidates()[: len(self._free)]
        slots, self._free = self._free[: len(missed)], self._free[len(missed) :]
        self._missed = []
        self._changes += 1
        if self._changes % HALVED == 0:
            self._counts >>= 1
        return missed, slots

    def leaving(self, place: torch.Tensor) -> torch.Tensor:
        """Rows that lose their slots now: those looked up less than rows that have none. ``place`` is the
        slot of every row, or -1."""
        outside = self._counts.numpy()[place.numpy() < 0]
        inside = np.flatnonzero(place.numpy() >= 0)
        most = min(MOST - len(self._free), len(inside), int(np.count_nonzero(outside)))
        if most <= 0:
            return torch.empty(0, dtype=torch.int64)
        counts = self._counts.numpy()[inside]
        least = np.argpartition(counts, most - 1)[:most]
        least = least[np.argsort(counts[least], kind="stable")]
        best = -np.sort(-np.partition(outside, len(outside) - most)[len(outside) - most :])
        gains = best > counts[least]
        rows = inside[least[: len(gains) if gains.all() else int(np.argmin(gains))]]
        self._free = np.concatenate((self._free, place.numpy()[rows].astype(np.int64)))
        return torch.from_numpy(rows)

    def _candidates(self) -> RowIds:
        if not self._missed:
            return np.empty(0, np.int64)
        rows = np.unique(torch.cat(self._missed).numpy())
        return rows[np.argsort(-self._counts.numpy()[rows], kind="stable")]

    @property
    def nbytes(self) -> int:
        """Memory of the counts."""
        return self._counts.nbytes
