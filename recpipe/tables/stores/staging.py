"""A bounded area of DRAM through which blocks are moved, with at most one copy of each block."""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

Slots = NDArray[np.int64]
Blocks = NDArray[np.int64]


class Staging:
    """``capacity`` page-aligned block buffers, reused in first-in, first-out order.

    ``bytes`` is the whole area as uint8; ``records`` sees it as float32 words
    [capacity, rows_per_block, record_words], ``words`` as the same in uint32.
    """

    def __init__(
        self, capacity: int, total_blocks: int, block_bytes: int, rows_per_block: int, record_words: int
    ) -> None:
        self.capacity = capacity
        self.bytes = np.frombuffer(mmap.mmap(-1, capacity * block_bytes), np.uint8)
        shape = (capacity, rows_per_block, record_words)
        strides = (block_bytes, 4 * record_words, 4)
        self.words: NDArray[np.uint32] = np.ndarray(shape, np.uint32, self.bytes, strides=strides)
        self._slot_of = np.full(total_blocks, -1, np.int32)
        self._block_of = np.full(capacity, -1, np.int64)
        self._next = 0

    @staticmethod
    def nbytes(capacity: int, total_blocks: int, block_bytes: int) -> int:
        """DRAM of the buffers and of the tables used to find them."""
        return capacity * (block_bytes + 8) + 4 * total_blocks

    def find(self, blocks: Blocks) -> Slots:
        """The slot of each block, or -1 if it is not staged."""
        return self._slot_of[blocks].astype(np.int64)

    def take(self, count: int, keep: Slots) -> Slots:
        """Take ``count`` slots that are not in ``keep``, oldest first, and forget what they held."""
        reach = count + len(keep)
        assert reach <= self.capacity, (reach, self.capacity)
        slots = (self._next + np.arange(reach)) % self.capacity
        if len(keep):
            kept = np.zeros(self.capacity, bool)
            kept[keep] = True
            slots = slots[~kept[slots]]
        slots = slots[:count]
        if count:
            self._next = (int(slots[-1]) + 1) % self.capacity
        self.forget(slots)
        return slots

    def hold(self, blocks: Blocks, slots: Slots) -> None:
        """Note that ``slots`` now hold the same ``blocks`` as the files."""
        self._slot_of[blocks] = slots
        self._block_of[slots] = blocks

    def forget(self, slots: Slots) -> None:
        """Note that ``slots`` hold nothing valid."""
        blocks = self._block_of[slots]
        self._slot_of[blocks[blocks >= 0]] = -1
        self._block_of[slots] = -1
