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
from recpipe.tables.stores.blocks import BlockMap, Places
from recpipe.tables.stores.checksum import RowChecksum
from recpipe.tables.stores.faults import store_error
from recpipe.tables.stores.filling import filled_chunks
from recpipe.tables.stores.home import StoreHome, StoreState, file_names
from recpipe.tables.stores.reader import RowReader
from recpipe.tables.stores.rowfiles import make_files, open_files
from recpipe.tables.stores.staging import Staging

STAGING_BYTES = 32 << 20
QUEUE_DEPTH = 128
STREAM_BLOCKS = 1024


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
        fds, self.direct = open_files(home, state.files, self._map.file_bytes)
        self._fds = np.array(fds, np.int64)
        self._transfer = open_transfer(depth, direct=self.direct)
        self.engine = self._transfer.engine
        self.shares_blocks = self._map.rows_per_block > 1
        blocks = self._map.staged(staging_bytes), self._map.total_blocks, self._map.block_bytes
        self._staging = Staging(*blocks, self._map.rows_per_block, self._map.record_words)
        self._overhead_bytes = Staging.nbytes(*blocks)
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
        state = store = None
        try:
            old = home.read_state()
            if old:
                home.discard(old)
            salt = int.from_bytes(os.urandom(8), "little")
            new = StoreState(layout, file_names(layout), salt, generation=old.generation + 1 if old else 1)
            home.refuse_foreign(new.files)
            state = new
            # Written first, so that files left by a crash are known to be the store's.
            home.write_state(state)
            make_files(home, state.files, BlockMap(layout).file_bytes)
            store = cls(home, state, staging_bytes, depth, scratch)
            store._fill(fill)
        except BaseException:
            home.remove(state)
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
            state = home.read_state()
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
            if crashed:
                store._refuse_torn()
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
            self._gather_piece(rows, places, out, piece)
        self.io.rows_read += len(rows)
        self.io.read_seconds += time.perf_counter() - began

    def reader(self, blocks: int = QUEUE_DEPTH) -> RowReader:
        """Reads rows while its caller does something else, ``blocks`` at a time; ``close`` closes it too."""
        reader = RowReader(
            self._map,
            self._checksum,
            self._fds,
            open_transfer(blocks, direct=self.direct),
            blocks,
            lambda requests, error: self._move_error(requests, error, "read"),
            self._torn_error,
        )
        self._readers.append(reader)
        self._overhead_bytes += reader.nbytes
        return reader

    def scatter(self, rows: Rows, records: Records) -> None:
        """Write records; StoreError if the disk fails; IndexError outside the layout.

        After an error each row is either unchanged, or new, or torn and then refused by ``gather``.
        """
        began = time.perf_counter()
        assert records.shape == (len(rows), self.layout.width), (records.shape, len(rows))
        places = self._map.places(rows)
        for piece in self._pieces(places):
            self._scatter_piece(rows, places, records, piece)
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

    def remove(self) -> None:
        """Delete the store's files; this process can use them until ``close``. Calling it again does
        nothing."""
        self._home.remove(self._state)

    def verify(self) -> Rows:
        """Read every record of the store; returns the global numbers of rows whose checksum is wrong."""
        torn = []
        for start, stop in self._stretches():
            rows = np.arange(start, stop)
            words = self._read(self._map.places(rows))
            torn.append(rows[self._bad(words, rows)])
        return np.concatenate(torn) if torn else np.empty(0, np.int64)

    @property
    def cold_bytes(self) -> int:
        """Bytes of the row files."""
        return sum(self._map.file_bytes)

    @property
    def overhead_bytes(self) -> int:
        """DRAM of the staging area and its tables, and of readers."""
        return self._overhead_bytes

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

    def _gather_piece(
        self, rows: Rows, places: Places, out: Records, piece: NDArray[np.int64] | slice
    ) -> None:
        words = self._read(Places(places.blocks[piece], places.lanes[piece]))
        bad = self._bad(words, rows[piece])
        if bad.any():
            raise self._torn_error(rows[piece][bad])
        out[piece] = words[:, :-1].view(np.float32)

    def _scatter_piece(
        self, rows: Rows, places: Places, records: Records, piece: NDArray[np.int64] | slice
    ) -> None:
        part = np.ascontiguousarray(records[piece], np.float32).view(np.uint32)
        words = np.empty((len(part), self._map.record_words), np.uint32)
        words[:, :-1] = part
        words[:, -1] = self._checksum(part, rows[piece])
        blocks, which, counts = np.unique(places.blocks[piece], return_inverse=True, return_counts=True)
        slots = self._staging.find(blocks)
        staged, absent = slots >= 0, slots < 0
        slots[absent] = self._staging.take(int(absent.sum()), keep=slots[staged])
        partial = absent & (counts < self._map.rows_in(blocks))
        self._move(blocks[partial], slots[partial], write=False)
        self._staging.words[slots[which], places.lanes[piece]] = words
        self._move(blocks, slots, write=True)
        self.io.rows_staged += int(counts[staged].sum())

    def _read(self, places: Places) -> NDArray[np.uint32]:
        """Records with their checksum words, uint32 [n, width + 1], read from the disk."""
        wanted, which = np.unique(places.blocks, return_inverse=True)
        blocks = self._map.bridged(wanted)
        if len(blocks) > self._staging.capacity:
            blocks = wanted
        which = np.searchsorted(blocks, wanted)[which]
        slots = self._staging.find(blocks)
        absent = slots < 0
        slots[absent] = self._staging.take(int(absent.sum()), keep=slots[~absent])
        self._move(blocks, slots, write=False)
        words: NDArray[np.uint32] = self._staging.words[slots[which], places.lanes]
        return words

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

    def _bad(self, words: NDArray[np.uint32], rows: Rows) -> NDArray[np.bool_]:
        bad: NDArray[np.bool_] = self._checksum(words[:, :-1], rows) != words[:, -1]
        return bad

    def _torn_error(self, torn: Rows) -> StoreError:
        places = [self._map.table_and_row(int(row)) for row in torn[:5]]
        rows = ", ".join(f"table {self.layout.tables[table]} row {row}" for table, row in places)
        index = places[0][0]
        more = f" and {len(torn) - 5} more" if len(torn) > 5 else ""
        remedy = self.remedy or (
            "start again from a checkpoint (resume=), and check the disk if this comes again"
        )
        return StoreError(
            f"ssd store: {self.directory / self._state.files[index]}: torn or corrupt: {rows}{more}: {remedy}"
        )

    def _refuse_torn(self) -> None:
        torn = self.verify()
        if len(torn):
            raise self._torn_error(torn)

    def _stretches(self) -> list[tuple[int, int]]:
        """Runs of consecutive global rows, each of at most ``STREAM_BLOCKS`` blocks of one table."""
        step = min(STREAM_BLOCKS, self._staging.capacity) * self._map.rows_per_block
        ends = pairwise(self.layout.bases.tolist())
        return [(row, min(stop, row + step)) for start, stop in ends for row in range(start, stop, step)]

    def _fill(self, fill: Fill) -> None:
        step = min(STREAM_BLOCKS, self._staging.capacity) * self._map.rows_per_block
        for start, records in filled_chunks(self.layout, fill, step):
            self.scatter(np.arange(start, start + len(records)), records)
        self.forget_staged()
        self.io = IoCounters()

    def _release(self) -> None:
        for reader in self._readers:
            reader.close()
        self._transfer.close()
        for fd in self._fds.tolist():
            os.close(fd)
        self._fds = np.empty(0, np.int64)
        del self._staging
        self._home.close()
