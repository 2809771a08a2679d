"""What a cache hits, for many budgets at once."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

Figures = NDArray[np.float64]


@dataclass
class Curve:
    """A policy's hits for each of G numbers of slots, in the batches that it is judged by."""

    hits: Figures
    """Lookups of resident rows [G]."""
    hit_rows: Figures
    """Resident rows among each batch's distinct ones, added up [G]."""
    carried: Figures
    """Rows that are not resident and that the batch before looked up too, added up [G]."""
    batches: int = 0
    lookups: float = 0.0
    rows: float = 0.0
    """The batches' distinct rows, added up."""

    @classmethod
    def empty(cls, points: int) -> Curve:
        """No batch yet."""
        return cls(np.zeros(points), np.zeros(points), np.zeros(points))

    def saw(self, lookups: Figures, rows: Figures) -> None:
        """Count a batch: for each of its distinct rows its lookups, and how many rows it stands for [U]."""
        self.batches += 1
        self.lookups += float(lookups.sum())
        self.rows += float(rows.sum())

    def hit(self, lookups: Figures, rows: Figures, again: Figures, resident: Figures) -> None:
        """Count a batch's hits: of classes of equal rows, with their ``lookups`` [K], numbers of distinct
        ``rows`` [K] and of those among them that the batch before had (``again`` [K]), the share
        ``resident`` [K, G] is resident."""
        self.hits += lookups @ resident
        self.hit_rows += rows @ resident
        self.carried += again.sum() - again @ resident

    def since(self, earlier: Curve) -> Curve:
        """The same of the batches after ``earlier``, a copy made then."""
        return Curve(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))

    def at(self, points: NDArray[np.int64]) -> Curve:
        """The same at some of its numbers of slots."""
        hits, rows, carried = self.hits[points], self.hit_rows[points], self.carried[points]
        return Curve(hits, rows, carried, self.batches, self.lookups, self.rows)

    def blended(self, other: Curve, share: float) -> Curve:
        """The average batch of both, of which a ``share`` is of ``other``'s."""
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        own, others = self.batches or 1, other.batches or 1
        return Curve(*((1 - share) * one / own + share * two / others for one, two in pairs))

    def fetched(self) -> Figures:
        """Rows that a batch has to fetch, on average [G]."""
        return (self.rows - self.hit_rows) / max(1, self.batches)
