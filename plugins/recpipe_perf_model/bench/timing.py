"""Times an operator as it runs in a step: among other work, with all threads or on each core at once.

In a step, other data is touched until an operator's memory is used again, and other operators run, so that
caches hold little of its values and of its machine code. So each timed call follows a pass over a drawn
number of other bytes and a small model's step. Where cores share a batch, each runs operators in one thread,
and they compete for caches and memory. So an operator in one thread is timed while the other cores run it
too.

Other programs, and on virtual machines other machines, slow a core down for seconds at a time. So each
operator is timed in several passes that lie seconds apart, until its two fastest passes agree. The fastest
says how operators compare; what they usually take is more, by as much as all operators' passes are slower.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from math import exp, log
from statistics import fmean, median
from time import perf_counter

import numpy as np
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from recpipe.common.device import keep_to_one_core, one_thread
from recpipe.profiling.limits import Sample
from recpipe_perf_model.kernels.operators import FREE, Operator, watched

SPREADS = (0.0, 2.0**20, 2.0**22, 2.0**24, 2.0**25)
"""Bytes that are touched between two calls, of which one number is drawn for each sample."""
PIECE = 2**20
"""Values of those bytes that one call touches, so that the code of calls stays where a step would have it."""
ROUNDS = (5, 15)
"""The least and the most calls that are timed in a pass; their median counts."""
LEAST_SECONDS = 0.004
"""Calls are timed until they, and what is between them, took so long together."""
PASSES = (2, 6)
"""The least and the most passes."""
AGREE = 1.05
"""The two fastest passes agree if one took at most so much longer than the other."""
SHORT = 50e-6
"""A call that takes less is timed while other cores multiply matrices, and not while they make the same short
call, since that would measure how they wait for Python's lock."""
BACKGROUND = 256
"""Rows and columns of those matrices."""
CHUNK = 200
"""Calls of which each is timed once in a pass."""
SETS = 4
"""Sets of operands that the other cores take in turn."""
Run = Callable[[], object]
Make = Callable[[], Run]
"""Makes the operands, and returns the call."""
Wanted = tuple[Operator, Make, float]
"""An operator, what makes its call, and the bytes that are touched between two calls."""


class Clock:
    """Times operators with ``threads`` threads, torch's own number, and on as many cores at the same time."""

    def __init__(self, seed: int) -> None:
        self.threads = torch.get_num_threads()
        self._random = np.random.default_rng(seed)
        self._others = ThreadPoolExecutor(max(1, self.threads - 1), "recpipe-bench", keep_to_one_core)
        self._filler = torch.ones(int(max(SPREADS)) // 4)
        self._step = _small_step()
        self._longer: list[float] = []

    def close(self) -> None:
        """End the threads."""
        self._others.shutdown()

    @property
    def modes(self) -> tuple[int, ...]:
        """Numbers of threads of an operator: all, and one on each core."""
        return (self.threads, 1) if self.threads > 1 else (1,)

    def samples(self, makes: Iterable[Make]) -> Iterator[Sample]:
        """The times of what made calls run, in each of the modes. A call of several operators is left out."""
        made = iter(makes)
        while chunk := list(islice(made, CHUNK)):
            wanted = [each for make in chunk for each in self._wanted(make)]
            for (operator, _, _), seconds in zip(wanted, self._usual(wanted), strict=True):
                yield Sample(operator.kind, operator.at, seconds)

    def _usual(self, wanted: Sequence[Wanted]) -> list[float]:
        """The seconds of the fastest pass of each, times how many times as long a pass takes: the geometric
        mean over the passes that each operator timed so far had at least."""
        least, _ = PASSES
        passes = self._passes(wanted)
        self._longer += [log(seconds / min(found)) for found in passes for seconds in found[:least]]
        longer = exp(fmean(self._longer or [0.0]))
        return [longer * min(found) for found in passes]

    def _passes(self, wanted: Sequence[Wanted]) -> list[list[float]]:
        """The seconds of the passes of each."""
        least, most = PASSES
        times: list[list[float]] = [[] for _ in wanted]
        for number in range(most):
            for each, found in zip(wanted, times, strict=True):
                if number < least or not _agree(found):
                    found.append(self._seconds(*each))
        return times

    def _wanted(self, make: Make) -> Iterator[Wanted]:
        """What a made call runs in each of the modes, and the bytes that are touched between two calls."""
        operators = list(watched(make()))
        work = [each for each in operators if each.kind not in FREE] or operators[:1]
        for threads in self.modes if len(work) == 1 else ():
            spread = float(self._random.choice(SPREADS))
            yield _among(work[0], threads, spread), make, spread

    def timed(self, made: Iterable[tuple[Operator, Make]]) -> Iterator[Sample]:
        """The times of operators that are told, each of which a made call runs once a step."""
        far = SPREADS[-1]
        wanted = [
            (_among(operator, threads, far), make, far) for operator, make in made for threads in self.modes
        ]
        for (operator, _, _), seconds in zip(wanted, self._usual(wanted), strict=True):
            yield Sample(operator.kind, operator.at, seconds)

    def _seconds(self, operator: Operator, make: Make, spread: float) -> float:
        if operator.at["threads"] != 1 or self.threads == 1:
            return self._alone(make(), spread)
        with one_thread():
            return self._together(make, spread)

    def _alone(self, run: Run, spread: float) -> float:
        least, most = ROUNDS
        pieces = torch.split(self._filler[: int(spread) // 4], PIECE) if spread else ()
        kept, times, begun = run(), list[float](), perf_counter()
        while len(times) < least or (perf_counter() - begun < LEAST_SECONDS and len(times) < most):
            for piece in pieces:
                piece.sum()
            self._step()
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


def _agree(times: Sequence[float]) -> bool:
    """Whether the two fastest do."""
    first, second = sorted(times)[:2]
    return second <= AGREE * first


def _small_step() -> Run:
    """Forward and backward passes of a small model."""
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.Sigmoid(), nn.Linear(16, 1))
    samples, labels = torch.ones(16, 16), torch.zeros(16)

    def step() -> None:
        with torch.enable_grad():
            joined = torch.cat([samples[:, :8], samples[:, 8:]], dim=1)
            loss = binary_cross_entropy_with_logits(model(joined).view(-1), labels)
        torch.autograd.grad(loss, list(model.parameters()))

    return step


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
