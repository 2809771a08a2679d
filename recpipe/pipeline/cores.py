"""Trains parts of a batch on several cores; each takes its own samples through the whole dense part.

With OpenMP, cores share every operator: they meet at the end of each, fetch what the others have just
computed from their caches, and wait while one looks up rows, updates tables or runs Python. Here they meet
only twice::

    this core     look up | forward, and all the way back | update the tables
    other cores   forward ........ | and all the way back ..................

when the rows are looked up, and when the gradients of all rows are computed. Sums over the batch are made in
another order, which is always the same for a given number of cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from recpipe.common.device import keep_to_one_core, one_thread

T = TypeVar("T")
FirstShare = Callable[[int], float | None]
"""For a number of samples, the first core's fraction of an equal share; None: cores do not share the
batch."""
ROWS = 16
"""Shares are multiples of this, the number of rows that oneDNN's kernels process at a time."""


class Cores:
    """``count`` cores, of which one is the calling thread's."""

    def __init__(self, count: int, first_share: FirstShare) -> None:
        self.count, self._first_share = count, first_share
        self._others = ThreadPoolExecutor(count - 1, "recpipe-samples", keep_to_one_core)

    def close(self) -> None:
        """End the other cores' threads."""
        self._others.shutdown()

    def shares(self, samples: int) -> list[int]:
        """The ends of the cores' shares of ``samples``; one share if sharing is not faster.

        The first share is the calling thread's, which alone works on the tables.
        """
        first = self._first_share(samples)
        if first is None:
            return [samples]
        own = int(samples * first / self.count) // ROWS * ROWS
        each = -(-(samples - own) // (self.count - 1) // ROWS) * ROWS
        bounds = [own + each * number for number in range(self.count - 1)]
        return [*(bound for bound in bounds if 0 < bound < samples), samples]

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run ``work`` in another core's thread."""
        return self._others.submit(work)

    @contextmanager
    def shared(self) -> Iterator[None]:
        """In the block, this thread's operators use one core."""
        with one_thread():
            yield
