"""How much longer work takes on ranks side by side that wait for each other after it: cores that share their
units and the memory, and the time until the slowest rank is there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.distributed as dist

from recpipe.profiling.limits import Sample

KIND = "side by side"
TIMES = (1, 4, 12)
"""How often a piece of work runs between two meetings."""
ROUNDS = 60
LEFT_OUT = 0.05
"""The share of the longest rounds that do not count: interrupts that no run of seconds would have."""


def measure(group: dist.ProcessGroup, quick: bool) -> Iterator[Sample]:
    """A sample for each of ``TIMES``: work whose ``seconds`` are those of one rank while the others are idle,
    and its time if all ranks do it, until all have done it. All ranks call this."""
    work, rounds = _work(), ROUNDS // 3 if quick else ROUNDS
    meeting = _mean([_elapsed(group, lambda: None) for _ in range(rounds)])
    for times in TIMES:
        alone = 0.0
        dist.barrier(group)
        if group.rank() == 0:
            alone = _mean([_timed(work, times) for _ in range(rounds)])
        dist.barrier(group)
        together = _mean([_elapsed(group, lambda times=times: _repeat(work, times)) for _ in range(rounds)])  # type: ignore[misc]
        told = torch.tensor([alone, together - meeting], dtype=torch.float64)
        dist.broadcast(told, 0, group=group)
        seconds, elapsed = told.tolist()
        at: dict[str, float | str] = {"seconds": seconds, "ranks": float(group.size())}
        yield Sample(KIND, at, max(seconds, elapsed))


def _work() -> Callable[[], object]:
    """About 0.2 ms of what a step does: a layer, a pass, random rows."""
    rows, ids = torch.full((2**18, 32), 0.01), torch.randint(0, 2**18, (2_000,))
    values, weights = torch.full((256, 256), 0.01), torch.full((256, 256), 0.01)

    def run() -> object:
        return rows[ids].sum(), torch.relu(values @ weights).sum()

    return run


def _repeat(work: Callable[[], object], times: int) -> None:
    for _ in range(times):
        work()


def _timed(work: Callable[[], object], times: int) -> float:
    began = time.perf_counter()
    _repeat(work, times)
    return time.perf_counter() - began


def _elapsed(group: dist.ProcessGroup, run: Callable[[], object]) -> float:
    """From one meeting of all ranks to the next."""
    dist.barrier(group)
    began = time.perf_counter()
    run()
    dist.barrier(group)
    return time.perf_counter() - began


def _mean(times: list[float]) -> float:
    kept = sorted(times)[: max(1, int((1 - LEFT_OUT) * len(times)))]
    return float(np.mean(kept))
