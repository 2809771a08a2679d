"""Which block of which table's file holds a row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recpipe.plugin.store import Rows, StoreLayout
from recpipe.tables.stores.aio import Requests

BLOCK_BYTES = 4096
MAX_RUN_BYTES = 256 << 10
"""Adjacent blocks are moved by one request of at most this size."""


@dataclass(frozen=True)
class Places:
    """The places of rows: ``blocks`` (numbered over all files) and ``lanes`` (the record within a block),
    int64 [n]."""

    blocks: NDArray[np.int64]
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
        self._bases = layout.bases
        counts = [-(-rows // self.rows_per_block) for rows in layout.rows]
        self.first_blocks = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        self.file_bytes = [count * self.block_bytes for count in counts]

    @property
    def total_blocks(self) -> int:
        """Blocks of all files together."""
        return int(self.first_blocks[-1])

    def staged(self, staging_bytes: int) -> int:
        """How many blocks a staging area of so many bytes holds; at least one."""
        return max(1, min(staging_bytes // self.block_bytes, self.total_blocks))

    def places(self, rows: Rows) -> Places:
        """Block and lane of global row numbers; IndexError for one outside the layout."""
        if len(rows) and (rows.min() < 0 or rows.max() >= self._bases[-1]):
            raise IndexError(f"row outside 0..{self._bases[-1] - 1}")
        tables = self._bases.searchsorted(rows, "right") - 1
        within, lanes = np.divmod(rows - self._bases[tables], self.rows_per_block)
        return Places(within + self.first_blocks[tables], lanes)

    def rows_in(self, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many rows each block holds, int64 [n]: ``rows_per_block``, or fewer in a table's last block."""
        tables = self.tables_of(blocks)
        start = (blocks - self.first_blocks[tables]) * self.rows_per_block
        rows = np.asarray(self.layout.rows, np.int64)[tables]
        return np.minimum(rows - start, self.rows_per_block)

    def tables_of(self, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Index of the table that each block belongs to."""
        return self.first_blocks.searchsorted(blocks, "right") - 1

    def table_and_row(self, row: int) -> tuple[int, int]:
        """Index of the table, and the row within it, of a global row number."""
        table = int(np.searchsorted(self._bases, row, "right")) - 1
        return table, row - int(self._bases[table])

    def bridged(self, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """``blocks`` (ascending) and each block that alone lies between two of them in its file: a disk reads
        three blocks by one request sooner than two by two."""
        alone = blocks[:-1][np.diff(blocks) == 2]
        alone = alone[self.tables_of(alone) == self.tables_of(alone + 2)] + 1
        return np.insert(blocks, np.searchsorted(blocks, alone), alone)

    def requests(
        self, blocks: NDArray[np.int64], slots: NDArray[np.int64], fds: NDArray[np.int64]
    ) -> Requests:
        """Transfers between ``blocks`` (ascending) and ``slots``. What is adjacent in both becomes one
        request."""
        tables = self.tables_of(blocks)
        joined = (np.diff(blocks) == 1) & (np.diff(slots) == 1) & (np.diff(tables) == 0)
        starts = np.concatenate(([0], np.flatnonzero(~joined) + 1))[: len(blocks)]
        lengths = np.diff(np.append(starts, len(blocks)))
        most = max(1, MAX_RUN_BYTES // self.block_bytes)
        if len(lengths) and lengths.max() > most:
            starts, lengths = _cut(starts, lengths, most)
        tables = tables[starts]
        return Requests(
            fds=fds[tables],
            offsets=(blocks[starts] - self.first_blocks[tables]) * self.block_bytes,
            positions=slots[starts] * self.block_bytes,
            lengths=lengths * self.block_bytes,
        )


def _cut(
    starts: NDArray[np.int64], lengths: NDArray[np.int64], most: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split runs into pieces of at most ``most`` blocks."""
    pieces = -(-lengths // most)
    run = np.repeat(np.arange(len(starts)), pieces)
    piece = np.arange(len(run)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    return starts[run] + piece * most, np.minimum(lengths[run] - piece * most, most)
