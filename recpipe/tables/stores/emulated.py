"""A slower cold tier than this machine's: a wrapper of any local store that delays each request."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from recpipe.distributed.ranks import Emulation
from recpipe.tables.stores.base import ColdStore, IoCounters, Records, Rows


class EmulatedStore(ColdStore):
    """Passes requests to ``inner`` and then waits, as a link of ``emulation``'s latency and bandwidth would
    take for their records. Owned: ``close`` closes it.

    The wait leaves the processor to other threads, as a device does. It counts as reading or writing time.
    """

    def __init__(self, inner: ColdStore, emulation: Emulation) -> None:
        self.inner, self.emulation = inner, emulation
        self.layout, self.direct, self.rounded = inner.layout, inner.direct, inner.rounded

    @property
    def io(self) -> IoCounters:  # type: ignore[override]
        """That of ``inner``."""
        return self.inner.io

    def gather(self, rows: Rows, out: Records) -> None:
        """As ``inner``, later."""
        self.inner.gather(rows, out)
        self.io.read_seconds += self._wait(out.nbytes)

    def scatter(self, rows: Rows, records: Records) -> None:
        """As ``inner``, later."""
        self.inner.scatter(rows, records)
        self.io.write_seconds += self._wait(records.nbytes)

    def _wait(self, size: int) -> float:
        seconds = self.emulation.seconds(size) if size else 0.0
        time.sleep(seconds)
        return seconds

    def staged(self, rows: Rows) -> NDArray[np.bool_]:
        """As ``inner``."""
        return self.inner.staged(rows)

    def flush(self) -> None:
        """As ``inner``."""
        self.inner.flush()

    def close(self) -> None:
        """Close ``inner``."""
        self.inner.close()

    def background(self) -> IoCounters:
        """As ``inner``."""
        return self.inner.background()

    @property
    def cold_bytes(self) -> int:
        """As ``inner``."""
        return self.inner.cold_bytes

    @property
    def overhead_bytes(self) -> int:
        """As ``inner``."""
        return self.inner.overhead_bytes
