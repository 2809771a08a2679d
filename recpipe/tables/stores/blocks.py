"""Blocks of an ssd store: which one holds a row, its checksum, and the memory that blocks pass through."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recpipe.plugin.store import Rows, StoreLayout
from recpipe.tables.stores.aio import Requests

BLOCK_BYTES = 4096
MAX_RUN_BYTES = 256 << 10
"""Adjacent blocks are moved by one request of at most this size."""
Blocks = NDArray[np.int64]
Slots = NDArray[np.int64]


@dataclass(frozen=True)
class Places:
    """The places of rows: ``blocks`` (numbered over all files) and ``lanes`` (the record within a block),
    int64 [n]."""

    blocks: Blocks
    lanes: NDArray[np.int64]


class BlockMap:
    """Rows to blocks. A record is ``width`` float32 words and one checksum word.

    Blocks have 4096 bytes, and no record crosses a block's border. For larger records, a block has one record
    and as many times 4096 bytes as it needs. Blocks are numbered over all tables, in the order of the tables.
    """

    def __init__(self, layout: StoreLayout) -> None:
        self.layout = layout
        self.record_words = layout.width + 1
        record_bytes = 4 * self.record_words
        self.block_bytes = BLOCK_BYTES * -(-record_bytes // BLOCK_BYTES)
        self.rows_per_block = self.block_bytes // record_bytes
        self.bases = layout.bases
        counts = [-(-rows // self.rows_per_block) for rows in layout.rows]
        self.first_blocks = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        self.total_blocks = int(self.first_blocks[-1])
        self.file_bytes = [count * self.block_bytes for count in counts]

    def places(self, rows: Rows) -> Places:
        """Block and lane of global row numbers; IndexError for one outside the layout."""
        if len(rows) and (rows.min() < 0 or rows.max() >= self.bases[-1]):
            raise IndexError(f"row outside 0..{self.bases[-1] - 1}")
        tables = self.bases.searchsorted(rows, "right") - 1
        within, lanes = np.divmod(rows - self.bases[tables], self.rows_per_block)
        return Places(within + self.first_blocks[tables], lanes)

    def rows_in(self, blocks: Blocks) -> NDArray[np.int64]:
        """How many rows each block holds, int64 [n]: ``rows_per_block``, or fewer in a table's last block."""
        tables = self.tables_of(blocks)
        start = (blocks - self.first_blocks[tables]) * self.rows_per_block
        rows = np.asarray(self.layout.rows, np.int64)[tables]
        return np.minimum(rows - start, self.rows_per_block)

    def tables_of(self, blocks: Blocks) -> NDArray[np.int64]:
        """Index of the table that each block belongs to."""
        return self.first_blocks.searchsorted(blocks, "right") - 1

    def bridged(self, blocks: Blocks) -> Blocks:
        """``blocks`` (ascending) and each block that alone lies between two of them in its file: a disk reads
        three blocks by one request sooner than two by two."""
        alone = blocks[:-1][np.diff(blocks) == 2]
        alone = alone[self.tables_of(alone) == self.tables_of(alone + 2)] + 1
        return np.insert(blocks, np.searchsorted(blocks, alone), alone)

    def requests(self, blocks: Blocks, slots: Slots, fds: NDArray[np.int64]) -> Requests:
        """Transfers between ``blocks`` (ascending) and ``slots``. What is adjacent in both becomes one
        request."""
        tables = self.tables_of(blocks)
        joined = (np.diff(blocks) == 1) & (np.diff(slots) == 1) & (np.diff(tables) == 0)
        starts = np.concatenate(([0], np.flatnonzero(~joined) + 1))[: len(blocks)]
        lengths = np.diff(np.append(starts, len(blocks)))
        most = max(1, MAX_RUN_BYTES // self.block_bytes)
        if len(lengths) and lengths.max() > most:  # runs are split into pieces
            pieces = -(-lengths // most)
            run = np.repeat(np.arange(len(starts)), pieces)
            piece = np.arange(len(run)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
            starts, lengths = starts[run] + piece * most, np.minimum(lengths[run] - piece * most, most)
        tables = tables[starts]
        return Requests(
            fds=fds[tables],
            offsets=(blocks[starts] - self.first_blocks[tables]) * self.block_bytes,
            positions=slots[starts] * self.block_bytes,
            lengths=lengths * self.block_bytes,
        )

    def buffer(self, capacity: int) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
        """Page-aligned memory for ``capacity`` blocks: all of it as bytes, and its records as words, uint32
        [capacity, rows_per_block, record_words]."""
        memory = np.frombuffer(mmap.mmap(-1, capacity * self.block_bytes), np.uint8)
        shape = (capacity, self.rows_per_block, self.record_words)
        strides = (self.block_bytes, 4 * self.record_words, 4)
        return memory, np.ndarray(shape, np.uint32, memory, strides=strides)


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

    def __call__(self, words: NDArray[np.uint32], rows: Rows) -> NDArray[np.uint32]:
        """Checksums, uint32 [n], of records ``words`` (uint32 [n, width]) at global ``rows`` (int64 [n])."""
        numbers = rows.astype(np.uint64)
        total = np.einsum("ij,j->i", words, self._words)
        total += (numbers & np.uint64(0xFFFFFFFF)) * self._low
        total += (numbers >> np.uint64(32)) * self._high + self._start
        checksums: NDArray[np.uint32] = (total >> np.uint64(32)).astype(np.uint32)
        return checksums


class Staging:
    """Buffers of blocks, at least one and as many as fit ``staging_bytes``, reused in first-in, first-out
    order, with at most one copy of each block. ``bytes`` is the whole area, ``words`` its records (see
    ``BlockMap.buffer``)."""

    def __init__(self, blocks: BlockMap, staging_bytes: int) -> None:
        self.capacity, self.nbytes = self.size(blocks, staging_bytes)
        self.bytes, self.words = blocks.buffer(self.capacity)
        self._slot_of = np.full(blocks.total_blocks, -1, np.int32)
        self._block_of = np.full(self.capacity, -1, np.int64)
        self._next = 0

    @staticmethod
    def size(blocks: BlockMap, staging_bytes: int) -> tuple[int, int]:
        """How many buffers there are, and the DRAM that they and the tables used to find them take."""
        capacity = max(1, min(staging_bytes // blocks.block_bytes, blocks.total_blocks))
        return capacity, capacity * (blocks.block_bytes + 8) + 4 * blocks.total_blocks

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
