"""Parts of a batch on several cores, each of which takes its own samples through the whole dense part.

Where OpenMP shares out every operator, cores meet at the end of each, fetch what the others have just
computed out of their caches, and wait while one looks up rows, updates tables or runs Python. Here they meet
twice::

    this core     look up | forward, and all the way back | update the tables
    other cores   forward ........ | and all the way back ..................

when the rows are there, and when the gradients of all rows are. The sums are those of the whole batch, in
another order, which is always the same for a given number of cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch

from recpipe.threads import one_thread

T = TypeVar("T")
LEAST_SAMPLES = 768
"""For each core: with less, waking a thread and taking turns at Python cost more than this gains."""
FLOPS_PER_ID = {torch.float32: 6_000, torch.bfloat16: 10_000}
"""What a core computes of the dense part in the time of looking up a row and updating it, by precision."""
ROWS = 16
"""Shares are multiples of it: oneDNN's kernels take so many rows at a time."""
LEAST_SHARE = 0.8
"""Of an equal share, for the calling thread's core: with less, it would wait for the others' gradients."""


class Cores:
    """``count`` cores, of which one is the calling thread's.

    ``flops``: of a sample's matrix products, forward and backward. ``dtype``: what they are multiplied in.
    """

    def __init__(self, count: int, flops: int, dtype: torch.dtype) -> None:
        self.count, self.flops, self.dtype = count, flops, dtype
        self._others = ThreadPoolExecutor(count - 1, "recpipe-samples", partial(torch.set_num_threads, 1))

    def close(self) -> None:
        """End the other cores' threads."""
        self._others.shutdown()

    def shares(self, samples: int, ids: int) -> list[int]:
        """Where the cores' shares of ``samples`` end, which look up ``ids``; one share for too few samples.

        The calling thread's core, which has the tables to itself, comes first and has less, so that all end
        together.
        """
        if samples < LEAST_SAMPLES * self.count:
            return [samples]
        tables = ids * FLOPS_PER_ID[self.dtype] / max(1, samples * self.flops)
        first = max(LEAST_SHARE / self.count, (1 + tables) / self.count - tables)
        own = int(samples * first) // ROWS * ROWS
        each = -(-(samples - own) // (self.count - 1) // ROWS) * ROWS
        bounds = [own + each * number for number in range(self.count - 1)]
        return [*(bound for bound in bounds if bound < samples), samples]

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """``work`` in another core's thread."""
        return self._others.submit(work)

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Inside, this thread uses no core but its own."""
        with one_thread():
            yield
