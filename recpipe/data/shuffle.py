"""Another order of the training samples for each epoch, of which any piece is known without the ones before.

Samples on a disk cannot be put in an order at random one by one: each would be read for itself. So blocks of
neighbours are put in an order at random, and then the samples within windows of many blocks: while one is
trained, its blocks are all that is read. Memory is that of one window and of the blocks' order.
"""

from __future__ import annotations

import hashlib

import numpy as np

from recpipe.data.columns import Int64
from recpipe.data.sources.transforms import mix64

BLOCK = 1 << 10
"""Samples that are neighbours in the files and are read in one window."""
WINDOW = 1 << 20
"""Samples that are mixed with each other; of no more than these, each may come at any place."""


class Shuffled:
    """The order of ``samples`` samples in an ``epoch``, by ``seed``. ``within``: only windows of so many
    neighbours are mixed, and follow each other in time; None: all are.

    It depends on nothing else, so that every rank, and a resumed run, has the same one.
    """

    def __init__(self, samples: int, seed: int, epoch: int, within: int | None = None) -> None:
        self.samples, self.seed, self.epoch = samples, seed, epoch
        self._window = within or WINDOW
        self._whole = samples // BLOCK
        """Whole blocks; the rest of the samples, fewer than a block, comes last."""
        self._blocks = None if within else self._drawn("blocks", self._whole)
        # Blocks begin elsewhere in each epoch, so that the rest is of other samples.
        self._turn = 0 if within else self._key("turn") % samples
        self._latest: tuple[int, Int64] = (-1, np.empty(0, np.int64))

    def between(self, low: int, high: int) -> Int64:
        """The numbers of the samples at places ``low`` to ``high`` (excluded), int64 [high - low]."""
        parts = [np.empty(0, np.int64)]
        while low < high:
            number, offset = divmod(low, self._window)
            stop = min(self._window, offset + high - low)
            parts.append(number * self._window + self._of_window(number)[offset:stop])
            low += stop - offset
        places = np.concatenate(parts)
        if self._blocks is None:
            return places
        block, offsets = np.divmod(places, BLOCK)
        inside = block < self._whole
        block[inside] = self._blocks[block[inside]]
        return np.asarray((block * BLOCK + offsets + self._turn) % self.samples, np.int64)

    def _of_window(self, number: int) -> Int64:
        """The order within a window."""
        if self._latest[0] != number:
            size = min(self._window, self.samples - number * self._window)
            self._latest = number, self._drawn(f"window {number}", size)
        return self._latest[1]

    def _drawn(self, what: str, size: int) -> Int64:
        """Numbers 0 to ``size`` - 1 in an order at random: that of their hashes, which no two share and no
        version of a library changes."""
        keys = np.arange(size, dtype=np.uint64) + np.uint64(self._key(what))
        return np.argsort(mix64(keys)).astype(np.int64, copy=False)

    def _key(self, what: str) -> int:
        """64 bits for one use."""
        text = f"{self.seed} {self.epoch} {what}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
