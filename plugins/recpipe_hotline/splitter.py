"""Hotline's acceleration phase: a mini-batch becomes a popular and a non-popular micro-batch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recpipe.plugin import Batch, Split, Splitter


class PopularFirst(Splitter):
    """Puts samples whose rows are all resident first: they train while the others' cold rows are fetched."""

    def __init__(self, min_micro_batch: int) -> None:
        self.min_micro_batch = min_micro_batch
        self.samples = 0
        self.popular = 0
        self.batches = 0

    def split(self, batch: Batch, needs_cold: NDArray[np.bool_]) -> Split:
        """Popular samples, then the others, each in their own order.

        If either would have fewer than ``min_micro_batch`` samples, the batch is not cut: a small matrix
        product costs more than the wait it hides.
        """
        popular = np.flatnonzero(~needs_cold)
        others = np.flatnonzero(needs_cold)
        self.batches += 1
        self.samples += len(needs_cold)
        self.popular += len(popular)
        if min(len(popular), len(others)) < max(1, self.min_micro_batch):
            return Split(np.arange(len(needs_cold)), (len(needs_cold),))
        return Split(np.concatenate((popular, others)), (len(popular), len(needs_cold)))
