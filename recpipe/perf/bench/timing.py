"""Times an operator as it runs in a step: among other work, with all threads or on each core at once.

In a step, other data is touched until an operator's memory is used again, so that caches hold little of it.
So each timed call follows a pass over a drawn number of other bytes. Where cores share a batch, each runs
operators in one thread, and they compete for caches and memory. So an operator in one thread is timed while
the other cores run it too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from statistics import median
from time import perf_counter

import numpy as np
import torch

from recpipe.common.threads import keep_to_one_core, one_thread
from recpipe.perf.operators import FREE, Operator, watched
from recpipe.perf.profile import Sample

SPREADS = (0.0, 2.0**20, 2.0**22, 2.0**24, 2.0**25)
"""Bytes that are touched between two calls, of which one number is drawn for each sample."""
ROUNDS = (7, 25)
"""The least and the most calls that are timed."""
LEAST_SECONDS = 0.003
"""Calls are timed until they took so long together."""
SHORT = 50e-6
"""A call that takes less is timed while other cores multiply matrices, and not while they make the same short
call, since that would measure how they wait for Python's lock."""
BACKGROUND = 256
"""Rows and columns of those matrices."""
CHUNK = 400
"""Calls that are timed one after the other before each is timed again."""
SETS = 4
"""Sets of operands that the other cores take in turn."""
Run = Callable[[], object]
Make = Callable[[], Run]
"""Makes the operands, and returns the call."""


class Clock:
    """Times operators with ``threads`` threads, torch's own number, and on as many cores at the same time."""

    def __init__(self, seed: int) -> None:
        self.threads = torch.get_num_threads()
        self._random = np.random.default_rng(seed)
        self._others = ThreadPoolExecutor(max(1, self.threads - 1), "recpipe-bench", keep_to_one_core)
        self._filler = torch.ones(int(max(SPREADS)) // 4)

    def close(self) -> None:
        """End the threads."""
        self._others.shutdown()

    @property
    def modes(self) -> tuple[int, ...]:
        """Numbers of threads of an operator: all, and one on each core."""
        return (self.threads, 1) if self.threads > 1 else (1,)

    def samples(self, makes: Iterable[Make]) -> Iterator[Sample]:
        """The times of what made calls run, in each of the modes. A call of several operators is left out.

        Each is timed twice with others between, and the faster time counts, since other programs may disturb
        for a while.
        """
        made = iter(makes)
        while chunk := list(islice(made, CHUNK)):
            wanted = [each for make in chunk for each in self._wanted(make)]
            first = [self._seconds(*each) for each in wanted]
            for (operator, make, spread), seconds in zip(wanted, first, strict=True):
                again = self._seconds(operator, make, spread)
                yield Sample(operator.kind, operator.at, min(seconds, again))

    def _wanted(self, make: Make) -> Iterator[tuple[Operator, Make, float]]:
        """What a made call runs in each of the modes, and the bytes that are touched between two calls."""
        operators = list(watched(make()))
        work = [each for each in operators if each.kind not in FREE] or operators[:1]
        for threads in self.modes if len(work) == 1 else ():
            spread = float(self._random.choice(SPREADS))
            yield _among(work[0], threads, spread), make, spread

    def timed(self, operator: Operator, make: Make) -> Iterator[Sample]:
        """The times of ``operator``, which a made call runs once a step, in each of the modes."""
        for threads in self.modes:
            each = _among(operator, threads, SPREADS[-1])
            yield Sample(each.kind, each.at, self._seconds(each, make, SPREADS[-1]))

    def _seconds(self, operator: Operator, make: Make, spread: float) -> float:
        if operator.at["threads"] != 1 or self.threads == 1:
            return self._alone(make(), spread)
        with one_thread():
            return self._together(make, spread)

    def _alone(self, run: Run, spread: float) -> float:
        least, most = ROUNDS
        filler = self._filler[: int(spread) // 4]
        kept, times = run(), list[float]()
        while len(times) < least or (sum(times) < LEAST_SECONDS and len(times) < most):
            if spread:
                filler.sum()
            start = perf_counter()
            kept = run()
            times.append(perf_counter() - start)
        del kept
        return median(times)

    def _together(self, make: Make, spread: float) -> float:
        own = make()
        own()
        start = perf_counter()
        own()
        short = perf_counter() - start < SHORT
        with self._busy(_products if short else make):
            return self._alone(own, spread)

    @contextmanager
    def _busy(self, make: Make) -> Iterator[None]:
        """In the block, the other cores make calls."""
        done, begun = threading.Event(), threading.Semaphore(0)

        def go_on() -> None:
            runs = [make() for _ in range(SETS)]
            begun.release()
            while not done.is_set():
                for run in runs:
                    run()

        others: list[Future[None]] = [self._others.submit(go_on) for _ in range(self.threads - 1)]
        try:
            for _ in others:
                begun.acquire()
            yield
        finally:
            done.set()
            for other in others:
                other.result()


def _among(operator: Operator, threads: int, spread: float) -> Operator:
    """``operator`` with so many threads, and so many bytes that are touched between two of its calls."""
    at: dict[str, float | str] = {**operator.at, "threads": float(threads)}
    if "footprint" in at:
        at["reuse"] = float(at["footprint"]) + spread
    return replace(operator, at=at)


def _products() -> Run:
    return partial(torch.mm, torch.ones(BACKGROUND, BACKGROUND), torch.ones(BACKGROUND, BACKGROUND))


@contextmanager
def clock(seed: int = 0) -> Iterator[Clock]:
    """A clock for the block; ``seed`` decides which numbers of bytes are drawn."""
    made = Clock(seed)
    try:
        yield made
    finally:
        made.close()
