"""Times an operator as it runs in a step: with all threads, or on each core at the same time.

Where cores share a batch, each runs the same operators in one thread, and they compete for caches, memory and
Python's lock. So an operator in one thread is timed while the other cores run it too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from statistics import median
from time import perf_counter

import torch

from recpipe.common.threads import keep_to_one_core, one_thread
from recpipe.perf.operators import Operator, watched
from recpipe.perf.profile import Sample

ROUNDS = 5
SHORTEST = 0.0015
"""Least seconds that the repetitions of a round take together."""
SPREAD = 8 << 20
"""Operands are so many bytes in all, in several sets that take turns, as a step goes through its own."""
SETS = 16
"""Most sets of operands."""
Run = Callable[[], object]


class Clock:
    """Times operators with ``threads`` threads, torch's own number, and on as many cores at the same time."""

    def __init__(self, rounds: int = ROUNDS) -> None:
        self.threads, self.rounds = torch.get_num_threads(), rounds
        self._others = ThreadPoolExecutor(max(1, self.threads - 1), "recpipe-bench", keep_to_one_core)

    def close(self) -> None:
        """End the threads."""
        self._others.shutdown()

    @property
    def modes(self) -> tuple[int, ...]:
        """Numbers of threads of an operator: all, and one on each core."""
        return (self.threads, 1) if self.threads > 1 else (1,)

    def sample(self, make: Callable[[], Run], threads: int) -> Iterator[Sample]:
        """The time of what a made ``run`` calls, which is to be one operator. Nothing if it is several."""
        operators = list(watched(make()))
        work = [each for each in operators if each.kind not in ("view", "empty")] or operators[:1]
        if len(work) == 1:
            yield self.timed(work[0], make, threads)

    def timed(self, operator: Operator, make: Callable[[], Run], threads: int) -> Sample:
        """The time of ``operator``, which a made ``run`` calls."""
        size = float(operator.at.get("footprint") or _product_bytes(operator))
        sets = int(min(SETS, max(1, SPREAD / max(size, 1))))
        at = {**operator.at, "threads": float(threads)}
        return Sample(operator.kind, at, self.seconds([make for _ in range(sets)], threads))

    def seconds(self, makes: Sequence[Callable[[], Run]], threads: int) -> float:
        """Median seconds of a call; each of ``makes`` makes one set of operands."""
        if threads > 1 or self.threads == 1:
            return self._alone([make() for make in makes])
        with one_thread():
            return self._together(makes)

    def _alone(self, runs: Sequence[Run]) -> float:
        count = _count(runs)
        return median(_round(runs, count) for _ in range(self.rounds))

    def _together(self, makes: Sequence[Callable[[], Run]]) -> float:
        own = [make() for make in makes]
        done, begun = threading.Event(), threading.Semaphore(0)

        def go_on() -> None:
            runs = [make() for make in makes]
            begun.release()
            while not done.is_set():
                for run in runs:
                    run()

        others = [self._others.submit(go_on) for _ in range(self.threads - 1)]
        try:
            for _ in others:
                begun.acquire()
            return self._alone(own)
        finally:
            done.set()
            for other in others:
                other.result()


def _count(runs: Sequence[Run]) -> int:
    for run in runs:
        run()
    once = min(_round(runs, 1) for _ in range(2))
    return max(1, int(SHORTEST / max(once * len(runs), 1e-7)))


def _round(runs: Sequence[Run], count: int) -> float:
    start = perf_counter()
    for _ in range(count):
        for run in runs:
            run()
    return (perf_counter() - start) / count / len(runs)


def _product_bytes(operator: Operator) -> float:
    at = {name: float(operator.at.get(name, 0)) for name in ("b", "m", "n", "k")}
    width = 2 if operator.at.get("dtype") == "bfloat16" else 4
    return width * at["b"] * (at["m"] * at["k"] + at["k"] * at["n"] + at["m"] * at["n"])


@contextmanager
def clock(rounds: int = ROUNDS) -> Iterator[Clock]:
    """A clock for the block."""
    made = Clock(rounds)
    try:
        yield made
    finally:
        made.close()
