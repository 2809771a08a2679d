"""A slower cold tier than this machine's: a wrapper of any local store that delays each request."""

from __future__ import annotations

import time

from recpipe.distributed.ranks import Emulation
from recpipe.plugin.store import ColdStore, Records, Rows
from recpipe.tables.stores.front import FrontStore


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
