"""What a cold store does for so many rows: the blocks and requests of an ssd store, and its time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recpipe.plugin.store import StoreLayout
from recpipe.tables.build import staging_bytes
from recpipe.tables.stores.blocks import BLOCK_BYTES, BlockMap
from recpipe_perf_model.facts.facts import Facts
from recpipe_perf_model.facts.group_facts import GroupFacts
from recpipe_perf_model.kernels.linear import At
from recpipe_perf_model.kernels.moves import Times

WORD = 4


@dataclass(frozen=True)
class Spent:
    """The time of a request: of the thread that makes it, and of what it waits for."""

    busy: float = 0.0
    waits: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.busy + other.busy, self.waits + other.waits)

    def times(self, factor: float) -> Spent:
        """So many of them."""
        return Spent(factor * self.busy, factor * self.waits)


@dataclass(frozen=True)
class Touched:
    """The blocks of ``BLOCK_BYTES`` and the requests with which an ssd store moves some rows."""

    blocks: float
    requests: float


def touched(group: GroupFacts, width: int, rows: float, share: float, bridged: bool) -> Touched:
    """For so many distinct rows outside of the most popular ``share``, on average, if they are anywhere in
    their tables. ``width``: float32 words of a record. ``bridged``: to read them, with blocks that alone lie
    between two others."""
    blocks = requests = 0.0
    for size, wanted in zip(group.table_rows, cold_rows(group, rows, share), strict=True):
        layout = BlockMap(StoreLayout(("",), (size,), width))
        each, count = layout.rows_per_block, layout.total_blocks
        # A block is left alone if none of its rows is wanted.
        dense = 1 - (1 - min(1.0, wanted / size)) ** each
        alone = dense**2 * (1 - dense) if bridged else 0.0
        found = count * (dense + alone)
        begins = count * dense * (1 - dense) ** (2 if bridged else 1)
        per = layout.block_bytes / BLOCK_BYTES
        blocks += per * found
        requests += max(begins, min(1.0, wanted))
    return Touched(blocks, requests)


def cold_rows(group: GroupFacts, rows: float, share: float) -> list[float]:
    """How many of so many distinct cold ``rows`` are in each table, as in batches' lookups of rows outside of
    the most popular ``share``."""
    stretch, bases = group.stretch, np.concatenate(([0], np.cumsum(group.table_rows)))
    cold = stretch.rows[stretch.ranks >= share]
    if not len(cold):
        cold = stretch.rows
    per_table = np.bincount(
        np.searchsorted(bases, np.unique(cold), "right") - 1, minlength=len(group.table_rows)
    )
    sizes = np.array(group.table_rows, np.float64)
    left, found = rows, np.zeros(len(sizes))
    weights = np.maximum(per_table, 1e-9).astype(np.float64)
    while left > 1e-6 * max(1.0, rows) and (found < sizes).any():  # small tables fill up
        more = np.minimum(sizes - found, left * weights / weights[found < sizes].sum())
        more[found >= sizes] = 0.0
        found += more
        left -= float(more.sum())
    return [float(each) for each in found]


@dataclass(frozen=True)
class Store:
    """The cold store of one group of tables in a run, with its times on a machine."""

    facts: Facts
    group: GroupFacts
    times: Times
    cold_bytes: float = 0.0
    """Bytes of a record in the store, if it is not float32 there."""
    codec: str = ""
    """The codec of records, as ``Statement.codec``."""

    @property
    def width(self) -> int:
        """float32 words of a record in the store."""
        return int(-(-self.cold_bytes // WORD)) if self.cold_bytes else self.group.width

    def read(self, rows: float, share: float) -> Spent:
        """Read so many distinct rows."""
        return self._request("read", rows, share)

    def write(self, rows: float, share: float, staged: float) -> Spent:
        """Write them. ``staged``: the share of them around which an ssd store still has the blocks, so that
        it need not read these first."""
        if self.facts.store != "ssd":
            return self._request("write", rows, share)
        known = self._request("write", rows, share).times(staged)
        return known + self._request("rewrite", rows, share).times(1 - staged)

    @property
    def always_staged(self) -> float:
        """The share of an ssd store's blocks that its staging area has room for: those of rows read long ago
        are there with this probability."""
        layout = StoreLayout(tuple(map(str, self.group.table_rows)), self.group.table_rows, self.width)
        room = staging_bytes(self.facts.batch_size * self.group.features) / BLOCK_BYTES
        return min(1.0, room / max(1, BlockMap(layout).total_blocks))

    def staged(self, read: float, written: float, share: float) -> float:
        """The share of so many rows ``written`` whose blocks are in an ssd store's staging area when they are
        written, one batch after they were read: between the two, the next batch's blocks have come, and those
        of rows written before that were not there."""
        lookups = self.facts.batch_size * self.group.features
        room = staging_bytes(lookups) / BLOCK_BYTES
        reads = touched(self.group, self.width, read, share, bridged=True).blocks
        writes = touched(self.group, self.width, written, share, bridged=False).blocks
        found = 1.0
        for _ in range(50):
            found = min(1.0, max(0.0, (room - reads - (1 - found) * writes) / max(1.0, reads)))
        return found

    def _request(self, what: str, rows: float, share: float) -> Spent:
        if rows < 0.5:
            return Spent()
        kind = "ssd" if self.facts.store == "ssd" else "host"
        at: dict[str, float | str] = {"rows": rows, "width": float(self.width)}
        if kind == "ssd":
            moved = touched(self.group, self.width, rows, share, bridged=what == "read")
            at |= {"blocks": moved.blocks, "requests": moved.requests}
        elapsed = self.times.seconds(f"{kind} {what}", at)
        busy = min(elapsed, self.times.seconds(f"{kind} {what} busy", at))
        coding = self._coding(what, rows) if self.codec else Spent()
        return Spent(busy, elapsed - busy) + coding + Spent(0.0, self._network(rows))

    def _coding(self, what: str, rows: float) -> Spent:
        at: At = {"rows": rows, "width": float(self.group.width)}
        return Spent(self.times.seconds(f"{'decode' if what == 'read' else 'encode'} {self.codec}", at))

    def _network(self, rows: float) -> float:
        """What an emulated link adds."""
        return self.facts.emulation.seconds(int(WORD * self.width * rows))
