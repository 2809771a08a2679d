"""Runs work on tables in separate threads, in parallel and beside the training thread.

FBGEMM's CPU kernels use only the core that calls them, so that other cores idle while tables are looked up
and updated. Groups of tables need not wait for each other, and the dense optimizer need not wait for the
tables' update::

    this core     look up | ...dense part... | dense optimizer | update
    other cores   look up |                  | update          | update
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from time import perf_counter

from recpipe.common.device import keep_to_one_core, one_thread
from recpipe.common.timing import watched

Work = Callable[[], None]
"""Work on tables that no other work touches at the same time."""
WORTH = 2e-3
"""Work that takes fewer seconds runs in the calling thread, since waking a thread costs a tenth of this.
Results do not depend on the choice."""


class TableWorkers:
    """``count`` threads for work on tables, each of which uses one core."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._threads = ThreadPoolExecutor(count, "recpipe-tables", keep_to_one_core)
        self.busy = 0
        """How many cores the unfinished work may use."""
        self._begun: list[tuple[Work, Future[None]]] = []
        self._seconds: dict[str, list[float]] = {}
        """Seconds that the latest works of each kind took."""
        with one_thread():  # setting torch's number of threads also applies to all future threads
            self._threads.submit(int).result()

    def begin(self, kind: str, works: Sequence[Work]) -> None:
        """Begin ``works``, in any order. Call ``finish`` before anything else uses their tables.

        They run here and now if works of this ``kind`` were short the last time, or under torch's profiler,
        which does not see other threads.
        """
        before, now = sum(self._seconds.get(kind, ())), list[float]()
        self._seconds[kind] = now
        if before < WORTH or watched():
            for work in works:
                _timed(work, now)
            return
        for work in works:
            timed = partial(_timed, work, now)
            self._begun.append((timed, self._threads.submit(timed)))
        self.busy = min(self.count, len(works))

    def finish(self) -> None:
        """Wait for the work that was begun. Work that no thread has started yet runs here. Raises the work's
        faults."""
        begun, self._begun, self.busy = self._begun, [], 0
        for work, end in reversed(begun):
            if end.cancel():
                work()
        for _, end in begun:
            if not end.cancelled():
                end.result()

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()


def _timed(work: Work, seconds: list[float]) -> None:
    started = perf_counter()
    work()
    seconds.append(perf_counter() - started)
