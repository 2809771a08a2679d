"""How long batches will take, by what the latest ones took."""

from __future__ import annotations

from math import ceil

KEPT = 0.98
"""What a batch counts after the next one: the latest fifty count most."""
VARIED = 0.1
"""How far batch sizes must be from their mean, as a share of it, for the time of a sample to be known."""


class Pace:
    """A line through the sizes and times of the latest batches, the later the heavier.

    Where all had the same size, samples cost nothing and batches all: what is expected is then too little
    rather than too much.
    """

    def __init__(self) -> None:
        self.weight = self._samples = self._seconds = self._squares = self._products = 0.0

    def saw(self, samples: int, seconds: float) -> None:
        """A batch of so many samples took so long."""
        self.weight = KEPT * self.weight + 1
        self._samples = KEPT * self._samples + samples
        self._seconds = KEPT * self._seconds + seconds
        self._squares = KEPT * self._squares + samples * samples
        self._products = KEPT * self._products + samples * seconds

    def expected(self, samples: int, batch: int) -> float:
        """Seconds for so many samples in batches of at most ``batch``; 0 before there was one."""
        if not self.weight or not samples:
            return 0.0
        size, seconds = self._samples / self.weight, self._seconds / self.weight
        variance = self._squares / self.weight - size * size
        each = 0.0
        if variance > (VARIED * size) ** 2:
            each = max(0.0, (self._products / self.weight - size * seconds) / variance)
        start = max(0.0, seconds - each * size)
        return ceil(samples / batch) * start + samples * each
