"""Work on tables in threads of their own, beside each other and beside the training thread.

FBGEMM's CPU kernels use the core that calls them, so that others idle while tables are looked up and updated.
Groups of tables need not wait for each other, nor does the dense optimizer for the tables' update::

    this core     look up | ...dense part... | dense optimizer | update
    other cores   look up |                  | update          | update
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from time import perf_counter

from recpipe.common.phases import watched
from recpipe.common.threads import keep_to_one_core, one_thread

Work = Callable[[], None]
"""On tables that no other work of its time touches."""
WORTH = 2e-3
"""Seconds that work takes before threads are woken for it, which costs a tenth of that. Time alone decides:
the results are the same."""


class Beside:
    """``count`` threads for work on tables, each of which uses one core."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._threads = ThreadPoolExecutor(count, "recpipe-tables", keep_to_one_core)
        self._begun: list[tuple[Work, Future[None]]] = []
        self._seconds: dict[str, list[float]] = {}
        """What the last works of a kind took."""
        with one_thread():  # torch's number of threads is also that of all threads to come
            self._threads.submit(int).result()

    def begin(self, kind: str, works: Sequence[Work]) -> None:
        """Begin ``works``, in any order; ``finish`` comes before anything else looks at their tables.

        At once and here, where those of this ``kind`` were short the last time, and under torch's profiler,
        which sees no other threads.
        """
        before, now = sum(self._seconds.get(kind, ())), list[float]()
        self._seconds[kind] = now
        timed = [partial(_timed, work, now) for work in works]
        if before < WORTH or watched():
            for work in timed:
                work()
        else:
            self._begun = [(work, self._threads.submit(work)) for work in timed]

    @property
    def busy(self) -> int:
        """How many cores what was begun and not finished may use."""
        return min(self.count, len(self._begun))

    def finish(self) -> None:
        """Wait for what was begun; what no thread has taken up yet is done here. Raises its faults."""
        begun, self._begun = self._begun, []
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
