"""One uint32 per record that tells a torn, misplaced or foreign record from a whole one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class RowChecksum:
    """Multiply-shift hashing: the top 32 bits of ``sum(word_i * key_i)`` modulo 2**64.

    The words are the record's, followed by the two halves of its row number. With random 64-bit keys, two
    different inputs collide with probability 2**-32 (Dietzfelbinger, 1996), so torn records, swapped words
    and rows in another row's place are detected. The keys depend on ``salt``, so records of another store, or
    of an earlier run in the same files, are detected too.
    """

    def __init__(self, width: int, salt: int) -> None:
        keys = np.random.PCG64(salt).random_raw(width + 3).astype(np.uint64)
        self._words, self._low, self._high, self._start = keys[:width], *keys[width:]

    def __call__(self, words: NDArray[np.uint32], rows: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Checksums, uint32 [n], of records ``words`` (uint32 [n, width]) at global ``rows`` (int64 [n])."""
        numbers = rows.astype(np.uint64)
        total = np.einsum("ij,j->i", words, self._words)
        total += (numbers & np.uint64(0xFFFFFFFF)) * self._low
        total += (numbers >> np.uint64(32)) * self._high + self._start
        checksums: NDArray[np.uint32] = (total >> np.uint64(32)).astype(np.uint32)
        return checksums
