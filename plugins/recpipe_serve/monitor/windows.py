"""What a monitor keeps of the latest samples, in arrays of fixed sizes that the workers of a server share.

Each worker writes its own arrays; any of them may read those of the others. With a file they outlive a worker
and are found again by the one that takes its place.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recpipe.errors import UserError

WAYS = 8
"""Requests that share a place in the table of requests; a ninth one takes the place of the oldest."""
BLOCKS = 16
"""Parts of the window over ids; the oldest is dropped as a whole."""
REQUEST = np.dtype([("key", "<u8"), ("start", "<i8"), ("samples", "<i4"), ("joined", "<i4")])
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Sizes:
    """How much is kept."""

    tasks: int
    features: int
    window: int
    """Samples that drift and quality are computed over."""
    kept: int
    """Samples whose scores wait for labels."""
    bins: int
    """Most bins of a task's histogram."""

    def layout(self) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Shape and type of each array."""
        places = -(-self.kept // WAYS)
        return {
            "heads": ((4,), np.int64),  # samples scored, kept, and labelled, and those in the totals
            "scores": ((self.window, self.tasks), np.float32),
            "kept": ((self.kept, self.tasks), np.float32),
            "requests": ((places, WAYS), REQUEST),
            "pairs": ((self.window, 2, self.tasks), np.float32),
            "ids": ((BLOCKS, 1 + 3 * self.features), np.float64),  # samples, ids, missing ones, unknown ones
            "totals": ((self.tasks, self.bins + 1), np.float64),  # samples by bin, and the sum of predictions
            "wrong": ((self.features,), np.int64),
            "unknown": ((self.features,), np.int64),
            "posted": ((4,), np.int64),  # requests joined, unknown, and joined before; posts refused
        }


SCORED, KEPT, LABELLED, TOTALLED = range(4)
JOINED, UNKNOWN, AGAIN, REFUSED = range(4)
ALL_IDS, MISSING, UNKNOWN_IDS = range(3)


@dataclass(frozen=True)
class Kept:
    """The scores of a request that wait for its labels."""

    scores: Floats
    """float32 [N, T]."""
    record: NDArray[Any]
    """The request's entry in the table of requests, which another request may have taken meanwhile."""
    start: int
    """What makes it its own."""

    def joined(self) -> bool:
        """Whether its labels have come already; from now on they have."""
        if int(self.record["start"][0]) != self.start:
            return False
        before = bool(self.record["joined"][0])
        self.record["joined"] = 1
        return before


class Windows:
    """One worker's arrays. ``file``: where they are shared; None: in this process alone, whose memory is
    taken as they are written. ``UserError`` if the disk is full.
    """

    def __init__(self, sizes: Sizes, file: Path | None = None) -> None:
        self.sizes = sizes
        self.bytes = size = sum(_bytes(*own) for own in sizes.layout().values())
        if file is None:
            buffer = mmap.mmap(-1, size)
        else:
            try:
                with file.open("a+b") as stream:
                    # On a full disk, writing to the mapped file would end the process.
                    os.posix_fallocate(stream.fileno(), 0, size)
                    buffer = mmap.mmap(stream.fileno(), size)
            except OSError as fault:
                raise UserError(
                    f"the monitor cannot write {size:,} bytes to {file}: {fault.strerror}; free "
                    "space, set TMPDIR to another directory, or choose a smaller kept="
                ) from fault
        found: dict[str, NDArray[Any]] = {}
        start = 0
        for name, (shape, kind) in sizes.layout().items():
            found[name] = np.frombuffer(buffer, kind, prod(shape), start).reshape(shape)
            start += _bytes(shape, kind)
        self.heads, self.scores, self.pairs = found["heads"], found["scores"], found["pairs"]
        self.ids, self.totals, self.wrong = found["ids"], found["totals"], found["wrong"]
        self.unknown, self.posted = found["unknown"], found["posted"]
        self._kept, self._requests = found["kept"], found["requests"]

    def add(self, scores: Floats, ids: NDArray[Any]) -> None:
        """Put ``scores`` float32 [N, T] of at most a window of samples into the windows, and count their
        ``ids`` [3, F]: of each feature all of them, those that are missing, and those that are unknown."""
        head, width = int(self.heads[SCORED]), self.sizes.window / BLOCKS
        end = put(self.scores, head, scores)
        last = int((end - 1) // width)
        for begun in range(int((head - 1) // width) + 1, last + 1):
            self.ids[begun % BLOCKS] = 0
        block = self.ids[last % BLOCKS]
        block[0] += len(scores)
        block[1:] += ids.reshape(-1)
        self.heads[SCORED] = end

    def keep(self, ident: str, scores: Floats) -> None:
        """Keep the ``scores`` [N, T] of the request ``ident`` until newer ones need the room."""
        if len(scores) > self.sizes.kept:
            return
        key = key_of(ident)
        place = self._requests[key % len(self._requests)]
        same = np.flatnonzero(place["key"] == key)
        way = int(same[0]) if len(same) else int(place["start"].argmin())
        start = int(self.heads[KEPT])
        self.heads[KEPT] = put(self._kept, start, scores)
        place[way] = (key, start, len(scores), 0)

    def find(self, ident: str) -> Kept | None:
        """What is kept of the request ``ident``; None if that is nothing."""
        key = key_of(ident)
        place = self._requests[key % len(self._requests)]
        for way in np.flatnonzero((place["key"] == key) & (place["samples"] > 0)):
            start, samples = int(place["start"][way]), int(place["samples"][way])
            if start + self.sizes.kept >= int(self.heads[KEPT]):
                rows = np.arange(start, start + samples) % self.sizes.kept
                return Kept(self._kept[rows], place[way : way + 1], start)
        return None

    def latest(self, what: int) -> Floats:
        """The window of scores [N, T] (``SCORED``) or pairs [N, 2, T] (``LABELLED``), in no order."""
        ring = self.scores if what == SCORED else self.pairs
        return ring[: min(int(self.heads[what]), len(ring))].copy()


def put(ring: NDArray[Any], head: int, rows: NDArray[Any]) -> int:
    """Write ``rows`` over the oldest of ``ring``, to which ``head`` rows were written before; returns the
    new number."""
    size, end = len(ring), head + len(rows)
    rows = rows[-size:]
    start = (end - len(rows)) % size
    if start + len(rows) <= size:
        ring[start : start + len(rows)] = rows
    else:
        ring[start:], ring[: start + len(rows) - size] = rows[: size - start], rows[size - start :]
    return end


def key_of(ident: str) -> int:
    """64 bits that stand for a request's id."""
    return int.from_bytes(blake2b(ident.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


def _bytes(shape: Sequence[int], kind: Any) -> int:
    size: int = np.dtype(kind).itemsize
    return -(-prod(shape) * size // 64) * 64
