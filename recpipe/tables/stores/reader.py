"""``RowReader``: reads rows of a store's files while its caller does something else."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from recpipe.errors import StoreError
from recpipe.plugin.store import Records, Rows
from recpipe.tables.stores.aio import BlockTransfer, RequestError, Requests
from recpipe.tables.stores.blocks import BlockMap
from recpipe.tables.stores.checksum import RowChecksum


class RowReader:
    """Reads past the store's staging area; another thread may use the store meanwhile. Made by
    ``SsdStore.reader``.

    A row whose block is written meanwhile is the old one, the new one, or refused as torn: a caller who must
    know asks the one who writes. Calls come one at a time: ``start``, then ``finish``.
    """

    def __init__(
        self,
        blocks: BlockMap,
        checksum: RowChecksum,
        fds: NDArray[np.int64],
        transfer: BlockTransfer,
        capacity: int,
        fault: Callable[[Requests, RequestError], StoreError],
        torn: Callable[[Rows], StoreError],
    ) -> None:
        """``capacity``: blocks that are read at a time."""
        self._map, self._checksum, self._fds, self._transfer = blocks, checksum, fds, transfer
        self._fault, self._torn = fault, torn
        self._bytes = np.frombuffer(mmap.mmap(-1, capacity * blocks.block_bytes), np.uint8)
        shape = (capacity, blocks.rows_per_block, blocks.record_words)
        strides = (blocks.block_bytes, 4 * blocks.record_words, 4)
        self._words: NDArray[np.uint32] = np.ndarray(shape, np.uint32, self._bytes, strides=strides)
        self._slots = np.arange(capacity)
        self._positions, self._lengths = (
            self._slots * blocks.block_bytes,
            np.full(capacity, blocks.block_bytes),
        )
        self._rows: Rows = np.empty(0, np.int64)

    @property
    def nbytes(self) -> int:
        """DRAM of its buffers."""
        return self._bytes.nbytes

    def start(self, rows: Rows) -> None:
        """Begin to read ``rows`` (distinct, ascending, int64 [n]), and return. ``StoreError`` if the disk
        fails at once; then nothing is being read."""
        self._rows, self._places = rows, self._map.places(rows)
        self._begin(0)

    def finish(self, out: Records) -> None:
        """Wait for the records of these rows, float32 [n, width]. ``StoreError`` for a torn one, or if the
        disk fails."""
        start = 0
        while start < len(self._rows):
            if start:
                self._begin(start)
            try:
                self._transfer.finish()
            except RequestError as error:
                raise self._fault(self._requests, error) from error
            part = slice(start, self._end)
            words = self._words[self._which, self._places.lanes[part]]
            bad = self._checksum(words[:, :-1], self._rows[part]) != words[:, -1]
            if bad.any():
                raise self._torn(self._rows[part][bad])
            out[part] = words[:, :-1].view(np.float32)
            start = self._end

    def _begin(self, start: int) -> None:
        """Read the blocks of as many rows as there is room for, from the one numbered ``start`` on."""
        blocks = self._places.blocks[start : start + len(self._words)]
        self._end, self._which = start + len(blocks), self._slots[: len(blocks)]
        again = blocks[1:] == blocks[:-1]
        if again.any():  # several rows of one block
            first = np.append(True, ~again)
            self._which = first.cumsum() - 1
            blocks = blocks[first]
        count, tables = len(blocks), self._map.tables_of(blocks)
        offsets = (blocks - self._map.first_blocks[tables]) * self._map.block_bytes
        self._requests = Requests(self._fds[tables], offsets, self._positions[:count], self._lengths[:count])
        try:
            self._transfer.start(self._requests, self._bytes, write=False)
        except RequestError as error:
            raise self._fault(self._requests, error) from error

    def close(self) -> None:
        """Wait for what is being read."""
        self._transfer.close()
