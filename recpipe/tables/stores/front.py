"""Cold stores in front of another one: with encoded records, or slower than this machine's."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from recpipe.distributed.ranks import Emulation
from recpipe.plugin.quantizer import Coding
from recpipe.plugin.store import ColdStore, Fill, Records, Rows, StoreLayout

MakeLocal = Callable[[StoreLayout, Fill], ColdStore]
"""Makes this process's own store of records."""


class FrontStore(ColdStore):
    """Changes the records or the time of ``gather`` and ``scatter``, and passes all else on to ``inner``.

    ``inner`` is owned: ``close`` closes it. Traffic and bytes are those of ``inner``.
    """

    cold_bytes = overhead_bytes = 0

    def __init__(self, inner: ColdStore) -> None:
        self.inner = inner
        self.layout, self.direct = inner.layout, inner.direct
        self.rounded, self.rounded_there = inner.rounded, inner.rounded_there
        self.shares_blocks, self.io = inner.shares_blocks, inner.io
        self.cold_bytes, self.overhead_bytes = inner.cold_bytes, inner.overhead_bytes

    def staged(self, rows: Rows) -> NDArray[np.bool_]:
        """Which of ``rows`` ``inner`` could write without reading what surrounds them first, bool [n]."""
        return self.inner.staged(rows)

    def flush(self) -> None:
        """Let ``inner`` have all as durably as it can."""
        self.inner.flush()

    def close(self) -> None:
        """Close ``inner``."""
        self.inner.close()


class CodedStore(FrontStore):
    """Records of ``layout``, encoded in ``inner``. Its bytes are those of ``inner``; its seconds include the
    codec's."""

    def __init__(self, layout: StoreLayout, coding: Coding, inner: ColdStore) -> None:
        super().__init__(inner)
        self.layout, self.coding = layout, coding
        self.rounded, self.rounded_there = coding.rounded, coding.rounded_there

    def gather(self, rows: Rows, out: Records) -> None:
        """Decoded records."""
        words = np.empty((len(rows), self.coding.width), np.float32)
        self.inner.gather(rows, words)
        began = time.perf_counter()
        self.coding.decode(words, out)
        self.io.read_seconds += time.perf_counter() - began

    def scatter(self, rows: Rows, records: Records) -> None:
        """Encode ``records`` and write them."""
        began = time.perf_counter()
        words = self.coding.encoded(records)
        self.io.write_seconds += time.perf_counter() - began
        self.inner.scatter(rows, words)


def local_store(layout: StoreLayout, fill: Fill, coding: Coding | None, make: MakeLocal) -> ColdStore:
    """Make a store by ``make``, with encoded records if there is a ``coding``."""
    if coding is None:
        return make(layout, fill)
    return CodedStore(layout, coding, make(coding.layout(layout), coding.fill(fill)))


class EmulatedStore(FrontStore):
    """Passes requests to ``inner`` and then waits, as a link of ``emulation``'s latency and bandwidth would
    take for their records.

    The wait leaves the processor to other threads, as a device does. It counts as reading or writing time.
    """

    def __init__(self, inner: ColdStore, emulation: Emulation) -> None:
        super().__init__(inner)
        self.emulation = emulation

    def gather(self, rows: Rows, out: Records) -> None:
        """Read the records of ``rows`` into ``out``, after the time that the emulated device takes."""
        self.inner.gather(rows, out)
        self.io.read_seconds += self._wait(out.nbytes)

    def scatter(self, rows: Rows, records: Records) -> None:
        """Write the records of ``rows``, after the time that the emulated device takes."""
        self.inner.scatter(rows, records)
        self.io.write_seconds += self._wait(records.nbytes)

    def _wait(self, size: int) -> float:
        seconds = self.emulation.seconds(size) if size else 0.0
        time.sleep(seconds)
        return seconds
