"""The cold tier over ranks: rows partitioned over the holders of a torch.distributed group.

Row g is on holder ``g % H``, with number ``g // H`` there, in DRAM or on an SSD. Rows move in rounds. A round
consists of a few collectives that every trainer and holder enters: the rows to write and to read, the records
to write, the records read. The writes of all ranks in a round are applied before its reads, so a round also
confirms that earlier rows have arrived. Encoded records are sent as they are in the stores.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from recpipe.distributed.ranks import Channel, Ranks
from recpipe.plugin.collection import TableCollection
from recpipe.plugin.quantizer import Coding
from recpipe.plugin.store import ColdStore, Fill, IoCounters, Records, Rows, StoreLayout
from recpipe.plugin.tables import Region, Values
from recpipe.tables.stores.local import CodedStore, MakeLocal, local_store

TABLE = "rows"
"""The name of the only table in a holder's part."""


class HoldersStore(ColdStore):
    """Records on the holders. Every trainer makes the same sequence of calls, each with its own rows.

    Only one trainer writes a row in a round. Ranks that hold rows and do not train call ``serve``.
    """

    direct: bool | None
    cold_bytes = overhead_bytes = 0
    """Of this rank's part."""

    def __init__(
        self,
        layout: StoreLayout,
        fill: Fill,
        ranks: Ranks,
        make_local: MakeLocal,
        coding: Coding | None = None,
    ) -> None:
        self.layout = layout
        self.io = IoCounters()
        self.ranks = ranks
        self.channel: Channel = ranks.channel()
        self.local: ColdStore | None = None
        """This rank's part; None if it holds no rows."""
        if ranks.holds:
            here = part_layout(layout, ranks)
            self.local = local_store(here, part_fill(layout, fill, ranks), coding, make_local)
            self.cold_bytes, self.overhead_bytes = self.local.cold_bytes, self.local.overhead_bytes
        self.direct = self.local.direct if self.local else None
        self._coding, self._width = coding, layout.width
        if coding is not None:
            self.rounded, self.rounded_there = coding.rounded, coding.rounded_there
            self._width = coding.width
        self._raw = self.local.inner if isinstance(self.local, CodedStore) else self.local
        """This rank's part in the form in which records are sent, float32 [n, ``_width``]."""
        self._written = np.dtype([("row", "<i8"), ("record", "<f4", (self._width,))])
        self._nothing = np.empty((0, self._width), np.float32)
        self._open = True

    def owner_of(self, rows: Rows) -> Rows:
        """The holder of each row, as an index into ``ranks.holders``, int64 [n]."""
        return rows % len(self.ranks.holders)

    def local_rows(self, rows: Rows) -> Rows:
        """Numbers of ``rows`` within their holder's part, int64 [n]."""
        return rows // len(self.ranks.holders)

    def gather(self, rows: Rows, out: Records) -> None:
        """Run a round that reads ``rows`` (may be empty)."""
        self.exchange_rows(_NONE, np.empty((0, self.layout.width), np.float32), rows, out)

    def scatter(self, rows: Rows, records: Records) -> None:
        """Run a round that writes ``rows`` (may be empty)."""
        self.exchange_rows(rows, records, _NONE, np.empty((0, self.layout.width), np.float32))

    def exchange_rows(self, write: Rows, records: Records, read: Rows, out: Records) -> None:
        """Run a round that writes ``records`` of ``write`` and then reads ``read`` into ``out``."""
        began = time.perf_counter()
        assert records.shape == (len(write), self.layout.width), (records.shape, len(write))
        assert out.shape == (len(read), self.layout.width), (out.shape, len(read))
        sent = records if self._coding is None else self._coding.encoded(records)
        came = out if self._coding is None else np.empty((len(read), self._width), np.float32)
        self._round(write, sent, read, came, stop=False)
        if self._coding is not None:
            self._coding.decode(came, out)
        seconds = time.perf_counter() - began
        self.io.rows_read += len(read)
        self.io.rows_written += len(write)
        self.io.bytes_read += came.nbytes
        self.io.bytes_written += sent.nbytes
        if len(read):
            self.io.read_seconds += seconds
        else:
            self.io.write_seconds += seconds

    def serve(self) -> None:
        """Take part in the trainers' rounds until they close the store."""
        while not self._round(_NONE, self._nothing, _NONE, self._nothing, stop=False):
            pass
        self._open = False
        self.close()

    def _round(self, write: Rows, records: Records, read: Rows, out: Records, *, stop: bool) -> bool:
        """Run one round; returns whether a rank has closed the store in it."""
        writes, reads = self._by_owner(write), self._by_owner(read)
        totals = [len(write), len(read), int(stop)]
        headers = [
            np.array([[len(w), len(r), *totals]], np.int64) for w, r in zip(writes, reads, strict=True)
        ]
        told = np.concatenate(self.channel.exchange(headers, [1] * self.channel.size))
        if told[:, 2].any():
            packed = np.empty(len(write), self._written)
            packed["row"], packed["record"] = self.local_rows(write), records
            raw = packed.view(np.uint8).reshape(len(write), self._written.itemsize)
            came = self.channel.exchange([raw[part] for part in writes], told[:, 0].tolist())
            if self._raw is not None:
                written = np.concatenate(came).reshape(-1).view(self._written)
                if len(written):
                    self._raw.scatter(written["row"].copy(), written["record"].copy())
        if told[:, 3].any():
            numbers = self.local_rows(read)
            wanted = self.channel.exchange([numbers[part] for part in reads], told[:, 1].tolist())
            replies = [np.empty((len(ids), self._width), np.float32) for ids in wanted]
            for ids, reply in zip(wanted, replies, strict=True):
                if len(ids):
                    assert self._raw is not None, "only holders are asked for rows"
                    self._raw.gather(ids, reply)
            found = self.channel.exchange(replies, [len(part) for part in reads])
            for part, received in zip(reads, found, strict=True):
                out[part] = received
        return bool(told[:, 4].any())

    def _by_owner(self, rows: Rows) -> list[NDArray[np.int64]]:
        """Positions in ``rows`` of the rows of each rank, in the order of all ranks."""
        parts: list[NDArray[np.int64]] = [_NONE] * self.channel.size
        owners = self.owner_of(rows)
        for index, rank in enumerate(self.ranks.holders):
            parts[rank] = np.flatnonzero(owners == index)
        return parts

    def flush(self) -> None:
        """Make this rank's part as durable as its store can."""
        if self.local is not None:
            self.local.flush()

    def close(self) -> None:
        """Tell the holders that the trainers are done, and release this rank's part. Calling it again does
        nothing."""
        if self._open:
            self._open = False
            self._round(_NONE, self._nothing, _NONE, self._nothing, stop=True)
        if self.local is not None:
            self.local.close()


class HeldRows(TableCollection):
    """The tables of a rank that holds rows and does not train; only ``serve`` is used."""

    def __init__(self, store: HoldersStore) -> None:
        super().__init__()
        self.store = store

    def serve(self) -> None:
        """Take part in rounds until the trainers close the store."""
        self.store.serve()

    def regions(self) -> Iterator[Region]:
        """Empty: the trainers read and write its rows."""
        yield from ()

    def read(self, region: Region) -> Values:
        """Never called."""
        raise AssertionError("a rank that only holds rows owns no region")

    def write(self, region: Region, values: Values) -> None:
        """Never called."""
        raise AssertionError("a rank that only holds rows owns no region")


_NONE: Rows = np.empty(0, np.int64)


def part_layout(layout: StoreLayout, ranks: Ranks) -> StoreLayout:
    """One table of the rows that this rank holds, in the order of their global numbers."""
    index, holders = ranks.holders.index(ranks.rank), len(ranks.holders)
    return StoreLayout((TABLE,), (max(0, -(-(layout.total_rows - index) // holders)),), layout.width)


def part_fill(layout: StoreLayout, fill: Fill, ranks: Ranks) -> Fill:
    """First records of this rank's part, by number within it."""
    index, holders = ranks.holders.index(ranks.rank), len(ranks.holders)
    bases = layout.bases

    def part(table: str, start: int, stop: int) -> Records:
        """Records [start, stop) of the part: every ``holders``-th row of the tables they come from."""
        first, last = start * holders + index, (stop - 1) * holders + index
        pieces = []
        for number, name in enumerate(layout.tables):
            low, high = max(first, int(bases[number])), min(last + 1, int(bases[number + 1]))
            low += (index - low) % holders
            if low < high:
                pieces.append(fill(name, low - int(bases[number]), high - int(bases[number]))[::holders])
        return np.concatenate(pieces)

    return part
