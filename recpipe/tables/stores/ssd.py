"""The cold tier on a disk: one flat file of 4096-byte blocks per table, accessed past the page cache."""

from __future__ import annotations

import os
import time
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from recpipe.errors import StoreError
from recpipe.plugin.store import ColdStore, Fill, IoCounters, Records, Rows, StoreLayout
from recpipe.tables.stores.aio import RequestError, Requests, open_transfer
from recpipe.tables.stores.blocks import BlockMap, Places, RowChecksum, Staging
from recpipe.tables.stores.home import StoreHome, StoreState, read_state, store_error
from recpipe.tables.stores.local import filled_chunks

STAGING_BYTES = 32 << 20
QUEUE_DEPTH = 128
STREAM_BLOCKS = 1024
LONG_RUNS = 4
"""From so many blocks a run on, adjacent blocks are read into adjacent buffers, by one request a run, even if
some are staged elsewhere. With shorter runs that would save less than it costs in staged blocks."""


class SsdStore(ColdStore):
    """Records in files; make one with ``create`` or ``open``.

    On disk a record is its float32 words and a checksum word, and every record that ``gather``
    returns has been verified. ``gather`` always reads the disk. The staging area (``staging_bytes`` of DRAM)
    is not a cache: it only saves ``scatter`` from reading a block that was just gathered. ``scatter`` returns
    when its blocks are written; ``flush`` makes them durable.

    ``direct`` and ``engine`` ("aio" or "threads") tell how the files are accessed.
    """

    direct: bool
    remedy: str | None = None
    """What to do about rows that cannot be read or written; None: what a training run can do."""
    cold_bytes = 0
    """Bytes of the row files."""
    overhead_bytes = 0
    """DRAM of the staging area and its tables, and of readers."""

    def __init__(
        self, home: StoreHome, state: StoreState, staging_bytes: int, depth: int, scratch: bool = False
    ) -> None:
        """Open the row files of ``home``; use ``create`` or ``open`` instead."""
        self.layout = state.layout
        self.io = IoCounters()
        self.directory = home.path
        self._home, self._state, self._scratch = home, state, scratch
        self._map = BlockMap(self.layout)
        self._checksum = RowChecksum(self.layout.width, state.salt)
        fds, self.direct = home.open_files(state.files, self._map.file_bytes)
        self._fds = np.array(fds, np.int64)
        self._transfer = open_transfer(depth, direct=self.direct)
        self.engine = self._transfer.engine
        self.shares_blocks = self._map.rows_per_block > 1
        self._staging = Staging(self._map, staging_bytes)
        self._stream_rows = min(STREAM_BLOCKS, self._staging.capacity) * self._map.rows_per_block
        self.cold_bytes = sum(self._map.file_bytes)
        self.overhead_bytes = self._staging.nbytes
        self._readers: list[RowReader] = []

    @classmethod
    def create(
        cls,
        layout: StoreLayout,
        fill: Fill,
        directory: str | os.PathLike[str],
        *,
        staging_bytes: int = STAGING_BYTES,
        depth: int = QUEUE_DEPTH,
        scratch: bool = False,
    ) -> SsdStore:
        """Make a store in ``directory`` (created if it is missing) with the records that ``fill`` gives.

        A store that an earlier run left there is replaced, since the durable copy of rows is the checkpoint;
        the log names a crashed run's. ``close`` removes a ``scratch`` store, and the directory if a store
        made it and nothing else is in it. StoreError if a live run uses the directory, or if the files cannot
        be created or do not fit on the disk.
        """
        home = StoreHome(directory, make=True)
        store = None
        try:
            state = home.begin(layout)
            home.make_files(state.files, BlockMap(layout).file_bytes)
            store = cls(home, state, staging_bytes, depth, scratch)
            for start, records in filled_chunks(layout, fill, store._stream_rows):
                store.scatter(np.arange(start, start + len(records)), records)
            store.forget_staged()
            store.io = IoCounters()
        except BaseException:
            home.remove()
            if store:
                store._release()
            else:
                home.close()
            raise
        return store

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        *,
        recover: bool = False,
        staging_bytes: int = STAGING_BYTES,
        depth: int = QUEUE_DEPTH,
    ) -> SsdStore:
        """Open a store that ``create`` made in ``directory`` and ``close`` closed.

        A crashed run's store is refused. With ``recover``, every record is verified, and the store is refused
        only if some are torn. The StoreError names the remedy and the torn rows.
        """
        home = StoreHome(directory, make=False)
        try:
            state = home.state = read_state(home.path, home.fd)
            if state is None:
                raise StoreError(f"ssd store: there is no store in {home.path}: set tiers.dir= to one")
            crashed = state.state == "open"
            if crashed and not recover:
                raise StoreError(
                    f"ssd store: {home.path} was left by a run that crashed ({state.user}): start "
                    "again from a checkpoint (resume=), which fills it anew, or open it with "
                    "recover=True to verify every row"
                )
            store = cls(home, state, staging_bytes, depth)
        except BaseException:
            home.close()
            raise
        try:
            if crashed and len(torn := store.verify()):
                raise store._torn_error(torn)
            state.state, state.generation = "open", state.generation + 1
            home.write_state(state)
        except BaseException:
            store._release()
            raise
        return store

    def gather(self, rows: Rows, out: Records) -> None:
        """Read records; StoreError for a torn record or if the disk fails; IndexError outside the layout."""
        began = time.perf_counter()
        assert out.shape == (len(rows), self.layout.width), (out.shape, len(rows))
        places = self._map.places(rows)
        for piece in self._pieces(places):
            words, wrong = self._read(places, rows, piece)
            if wrong.any():
                raise self._torn_error(rows[piece][wrong])
            out[piece] = words[:, :-1].view(np.float32)
        self.io.rows_read += len(rows)
        self.io.read_seconds += time.perf_counter() - began

    def reader(self, blocks: int = QUEUE_DEPTH) -> RowReader:
        """Reads rows while its caller does something else, ``blocks`` at a time; ``close`` closes it too."""
        reader = RowReader(self, blocks)
        self._readers.append(reader)
        self.overhead_bytes += reader.nbytes
        return reader

    def scatter(self, rows: Rows, records: Records) -> None:
        """Write records; StoreError if the disk fails; IndexError outside the layout.

        After an error each row is either unchanged, or new, or torn and then refused by ``gather``.
        """
        began = time.perf_counter()
        assert records.shape == (len(rows), self.layout.width), (records.shape, len(rows))
        places, staging = self._map.places(rows), self._staging
        for piece in self._pieces(places):
            part = np.ascontiguousarray(records[piece], np.float32).view(np.uint32)
            words = np.empty((len(part), self._map.record_words), np.uint32)
            words[:, :-1] = part
            words[:, -1] = self._checksum(part, rows[piece])
            blocks, which, counts = np.unique(places.blocks[piece], return_inverse=True, return_counts=True)
            slots = staging.find(blocks)
            staged, absent = slots >= 0, slots < 0
            slots[absent] = staging.take(int(absent.sum()), keep=slots[staged])
            partial = absent & (counts < self._map.rows_in(blocks))
            self._move(blocks[partial], slots[partial], write=False)
            staging.words[slots[which], places.lanes[piece]] = words
            self._move(blocks, slots, write=True)
            self.io.rows_staged += int(counts[staged].sum())
        self.io.rows_written += len(rows)
        self.io.write_seconds += time.perf_counter() - began

    def staged(self, rows: Rows) -> NDArray[np.bool_]:
        """Those whose block is in the staging area."""
        return self._staging.find(self._map.places(rows).blocks) >= 0

    def forget_staged(self) -> None:
        """Empty the staging area, so that the next ``scatter`` reads what surrounds its rows first."""
        self._staging.forget(np.arange(self._staging.capacity))

    def flush(self) -> None:
        """Ask the disk to make every earlier ``scatter`` durable (fdatasync)."""
        for fd, name in zip(self._fds.tolist(), self._state.files, strict=True):
            try:
                os.fdatasync(fd)
            except OSError as error:
                raise store_error("flush", self.directory / name, error.errno or 0) from error

    def close(self) -> None:
        """Flush, mark the store as properly closed, release files and memory. Calling it again does nothing.

        A scratch store is removed instead.
        """
        if not len(self._fds):
            return
        try:
            if self._scratch:
                self.remove()
            else:
                self.flush()
                self._state.state = "closed"
                self._home.write_state(self._state)
        finally:
            self._release()

    def _release(self) -> None:
        for reader in self._readers:
            reader.close()
        self._transfer.close()
        for fd in self._fds.tolist():
            os.close(fd)
        self._fds = np.empty(0, np.int64)
        del self._staging
        self._home.close()

    def remove(self) -> None:
        """Delete the store's files; this process can use them until ``close``. Calling it again does
        nothing."""
        self._home.remove()

    def verify(self) -> Rows:
        """Read every record of the store; returns the global numbers of rows whose checksum is wrong."""
        torn = [np.empty(0, np.int64)]
        for base, end in pairwise(self.layout.bases.tolist()):
            for start in range(base, end, self._stream_rows):
                rows = np.arange(start, min(end, start + self._stream_rows))
                _, wrong = self._read(self._map.places(rows), rows, slice(None))
                torn.append(rows[wrong])
        return np.concatenate(torn)

    def _pieces(self, places: Places) -> list[NDArray[np.int64] | slice]:
        """Cut a call into pieces that each touch no more blocks than the staging area holds."""
        capacity = self._staging.capacity
        if len(places.blocks) <= capacity:
            return [slice(None)] if len(places.blocks) else []
        order = np.argsort(places.blocks, kind="stable")
        ordered = places.blocks[order]
        rank = np.cumsum(np.diff(ordered, prepend=ordered[0]) > 0)
        cuts = np.searchsorted(rank, np.arange(capacity, int(rank[-1]) + 1, capacity))
        return list(np.split(order, cuts))

    def _read(
        self, places: Places, rows: Rows, piece: NDArray[np.int64] | slice
    ) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
        """Read a piece of ``rows`` from the disk: their records with checksum words, uint32 [n, width + 1],
        and whether each is torn, bool [n]."""
        wanted, which = np.unique(places.blocks[piece], return_inverse=True)
        blocks = self._map.bridged(wanted)
        if len(blocks) > self._staging.capacity:
            blocks = wanted
        which = np.searchsorted(blocks, wanted)[which]
        slots = self._staging.find(blocks)
        absent = slots < 0
        if len(blocks) >= LONG_RUNS * (1 + np.count_nonzero(np.diff(blocks) > 1)):
            # Staged ones move to slots beside the others', since each would end a request.
            self._staging.forget(slots[~absent])
            absent[:] = True
        slots[absent] = self._staging.take(int(absent.sum()), keep=slots[~absent])
        self._move(blocks, slots, write=False)
        words: NDArray[np.uint32] = self._staging.words[slots[which], places.lanes[piece]]
        return words, self._checksum(words[:, :-1], rows[piece]) != words[:, -1]

    def _move(self, blocks: NDArray[np.int64], slots: NDArray[np.int64], *, write: bool) -> None:
        """Transfer blocks (ascending) between files and slots, which hold the blocks afterwards."""
        if not len(blocks):
            return
        requests = self._map.requests(blocks, slots, self._fds)
        self._staging.forget(slots)  # if this fails halfway, the slots hold nothing valid
        try:
            self._transfer.run(requests, self._staging.bytes, write=write)
        except RequestError as error:
            raise self._move_error(requests, error, "write" if write else "read") from error
        self._staging.hold(blocks, slots)
        if write:
            self.io.bytes_written += int(requests.lengths.sum())
        else:
            self.io.bytes_read += int(requests.lengths.sum())

    def _move_error(self, requests: Requests, error: RequestError, verb: str) -> StoreError:
        table = int(np.flatnonzero(self._fds == requests.fds[error.index])[0])
        each, size = self._map.rows_per_block, self._map.block_bytes
        first = int(requests.offsets[error.index]) // size * each
        end = min(self.layout.rows[table], first + int(requests.lengths[error.index]) // size * each)
        what = f"{verb} table {self.layout.tables[table]} rows {first} to {end - 1} in"
        return store_error(what, self.directory / self._state.files[table], error.code, self.remedy)

    def _torn_error(self, torn: Rows) -> StoreError:
        bases = self._map.bases
        tables = np.searchsorted(bases, torn, "right") - 1
        named = zip(tables[:5].tolist(), (torn - bases[tables])[:5].tolist(), strict=True)
        rows = ", ".join(f"table {self.layout.tables[table]} row {row}" for table, row in named)
        more = f" and {len(torn) - 5} more" if len(torn) > 5 else ""
        remedy = self.remedy or (
            "start again from a checkpoint (resume=), and check the disk if this comes again"
        )
        file = self.directory / self._state.files[tables[0]]
        return StoreError(f"ssd store: {file}: torn or corrupt: {rows}{more}: {remedy}")


class RowReader:
    """Reads past the store's staging area; another thread may use the store meanwhile. Made by
    ``SsdStore.reader``.

    A row whose block is written meanwhile is the old one, the new one, or refused as torn: a caller who must
    know asks the one who writes. Calls come one at a time: ``start``, then ``finish``.
    """

    def __init__(self, store: SsdStore, capacity: int) -> None:
        """``capacity``: blocks that are read at a time."""
        self._store, self._map, self._fds = store, store._map, store._fds
        self._transfer = open_transfer(capacity, direct=store.direct)
        self._bytes, self._words = self._map.buffer(capacity)
        self.nbytes = self._bytes.nbytes
        """DRAM of its buffers."""
        self._slots, size = np.arange(capacity), self._map.block_bytes
        self._positions, self._lengths = self._slots * size, np.full(capacity, size)
        self._rows: Rows = np.empty(0, np.int64)

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
                raise self._store._move_error(self._requests, error, "read") from error
            part = slice(start, self._end)
            words = self._words[self._which, self._places.lanes[part]]
            bad = self._store._checksum(words[:, :-1], self._rows[part]) != words[:, -1]
            if bad.any():
                raise self._store._torn_error(self._rows[part][bad])
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
            raise self._store._move_error(self._requests, error, "read") from error

    def close(self) -> None:
        """Wait for what is being read."""
        self._transfer.close()
