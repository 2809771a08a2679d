"""Collectives between ranks, by size: measured where a process group is, that is under torchrun."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from recpipe.profiling.limits import Sample
from recpipe_perf_model.bench.lookups import Clock

FAMILY = "collectives"
"""The family of a machine's profile that these samples are in."""
NAMES = ("all_to_all", "reduce_scatter", "all_gather", "all_reduce")
BYTES = (2**12, 2**16, 2**19, 2**22, 2**24)
LEAST = 1e-6
"""Seconds that a time is taken for that no clock could measure."""


@dataclass(frozen=True)
class Timed:
    """One collective over all ranks, each with ``bytes`` of input: elapsed and busy milliseconds, medians."""

    collective: str
    bytes: int
    times: NDArray[np.float64]


def measure(quick: bool) -> Iterator[Sample]:
    """A sample for each collective and size, with the number of ranks, and one of the processor's time in it
    (``... busy``); none without a process group."""
    group = dist.group.WORLD if dist.is_initialized() else None
    if group is None or group.size() < 2:
        return
    for timed in timed_collectives(group, Clock(torch.device("cpu")), BYTES[::2] if quick else BYTES):
        at: dict[str, float | str] = {"bytes": float(timed.bytes), "ranks": float(group.size())}
        at["threads"] = float(torch.get_num_threads())
        times = torch.tensor(timed.times)
        dist.all_reduce(times, group=group)
        elapsed, busy = (times / group.size() / 1e3).tolist()
        yield Sample(timed.collective, at, max(LEAST, elapsed))
        yield Sample(f"{timed.collective} busy", at, max(LEAST, busy))


def timed_collectives(
    group: dist.ProcessGroup, clock: Clock, sizes: tuple[int, ...] = BYTES
) -> Iterator[Timed]:
    """Time each collective at several sizes. Every rank of ``group`` must call this."""
    world = group.size()
    for name in NAMES:
        for size in sizes:
            count = size // 4 // world * world
            times = []
            for _ in range(24 if size < 2**22 else 8):
                run = _collective(name, count, group, clock.device)
                dist.barrier(group)
                before = clock.read()
                run()
                times.append(clock.read() - before)
            yield Timed(name, count * 4, np.median(times[3:], axis=0))


def _collective(
    name: str, count: int, group: dist.ProcessGroup, device: torch.device
) -> Callable[[], object]:
    world = group.size()
    given = torch.zeros(count, device=device)
    if name == "all_to_all":
        return lambda: dist.all_to_all_single(torch.empty_like(given), given, group=group)
    if name == "reduce_scatter":
        part = torch.empty(count // world, device=device)
        return lambda: dist.reduce_scatter_tensor(part, given, group=group)
    if name == "all_gather":
        return lambda: dist.all_gather_into_tensor(
            torch.empty(count * world, device=device), given, group=group
        )
    assert name == "all_reduce", name
    return lambda: dist.all_reduce(given, group=group)
