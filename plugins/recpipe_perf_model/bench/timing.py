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


class OperatorClock:
    """Times operators with ``threads`` threads, torch's own number, and on as many cores at the same time."""

    def __init__(self, seed: int = 0) -> None:
        """``seed`` decides which numbers of bytes are touched between two calls."""
        self.threads = torch.get_num_threads()
        self.modes = (self.threads, 1) if self.threads > 1 else (1,)
        """Numbers of threads of an operator: all, and one on each core."""
        self._random = np.random.default_rng(seed)
        self._others = ThreadPoolExecutor(max(1, self.threads - 1), "recpipe-bench", keep_to_one_core)
        self._filler = torch.ones(int(max(SPREADS)) // 4)
        self._step = _small_step()
        self._longer: list[float] = []
        """Logarithms of how many times as long an operator's first passes took as its fastest."""

    def close(self) -> None:
        """End the threads."""
        self._others.shutdown()

    def samples(self, makes: Iterable[Make]) -> Iterator[Sample]:
        """The times of what made calls run, in each of the modes. A call of several operators is left out."""
        made = iter(makes)
        while chunk := list(islice(made, CHUNK)):
            wanted: list[Wanted] = []
            for make in chunk:
                operators = watched(make())
                work = [each for each in operators if each.kind not in FREE] or operators[:1]
                for threads in self.modes if len(work) == 1 else ():
                    spread = float(self._random.choice(SPREADS))
                    wanted.append((_among(work[0], threads, spread), make, spread))
            yield from self._timed(wanted)

    def timed(self, made: Iterable[tuple[Operator, Make]]) -> Iterator[Sample]:
        """The times of operators that are told, each of which a made call runs once a step."""
        far = SPREADS[-1]
        yield from self._timed(
            [(_among(operator, threads, far), make, far) for operator, make in made for threads in self.modes]
        )

    def _timed(self, wanted: Sequence[Wanted]) -> Iterator[Sample]:
        """The fastest pass of each, times how many times as long a pass takes: the geometric mean over the
        passes that each operator timed so far had at least."""
        least, most = PASSES
        passes: list[list[float]] = [[] for _ in wanted]
        for number in range(most):
            for each, times in zip(wanted, passes, strict=True):
                fastest = sorted(times)[:2]
                if number < least or fastest[1] > AGREE * fastest[0]:
                    times.append(self._seconds(*each))
        self._longer += [log(seconds / min(times)) for times in passes for seconds in times[:least]]
        longer = exp(fmean(self._longer or [0.0]))
        for (operator, _, _), times in zip(wanted, passes, strict=True):
            yield Sample(operator.kind, operator.at, longer * min(times))

    def _seconds(self, operator: Operator, make: Make, spread: float) -> float:
        """The median of a pass. In one thread, the other cores are busy with the same meanwhile."""
        if operator.at["threads"] != 1 or self.threads == 1:
            return self._alone(make(), spread)
        with one_thread():
            run = make()
            run()
            start = perf_counter()
            run()
            short = perf_counter() - start < SHORT
            square = partial(torch.ones, BACKGROUND, BACKGROUND)
            with self._busy((lambda: partial(torch.mm, square(), square())) if short else make):
                return self._alone(run, spread)

    def _alone(self, run: Run, spread: float) -> float:
        least, most = ROUNDS
        pieces = torch.split(self._filler[: int(spread) // 4], PIECE) if spread else ()
        # A result lives until the next one is there, as in a step.
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
