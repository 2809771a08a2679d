"""Micro-benchmarks of this machine: lookups, collectives, and steps of small sharded collections.

All ranks run the same benchmark at the same time, after a barrier, so that it includes contention for cores
and memory. On a CPU a rank's time is its process's CPU time, since waiting for others is not work. On CUDA it
is elapsed time. Lookups and collectives are those of recpipe's machine profile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from time import perf_counter

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from recpipe_perf_model import COLLECTIVE_BYTES as BYTES
from recpipe_perf_model import LOOKUP_SHAPES as SHAPES
from recpipe_perf_model import LOOKUP_TABLES as TABLES
from recpipe_perf_model import Clock, id_pools, timed_collectives, timed_lookups

from recpipe_neo.machine_profile import CollectiveSample, LookupSample, Machine, MachineProfile
from recpipe_neo.steps import measure_exchanges

PASSES = 2
"""Passes over all benchmarks. The faster time counts, since other programs may disturb for seconds."""
PASS_SECONDS = 15.0
"""A pass that took longer is the last one: ranks that share few cores take turns, which evens times out."""


def measure(
    group: dist.ProcessGroup, device: torch.device, optimizer: EmbOptimType, collectives_known: bool = False
) -> MachineProfile:
    """Run all benchmarks. Every rank of ``group`` must call this and gets the same profile.

    ``optimizer``: the tables' fused optimizer. ``collectives_known``: leave collectives out. A time is the
    median of a few repetitions, then the mean over the ranks, then the minimum over the passes; there is one
    pass where that took longer than ``PASS_SECONDS``.
    """
    clock = Clock(device)
    pools = id_pools(np.random.default_rng(group.rank()), [rows for _, rows in TABLES])
    passes: list[MachineProfile] = []
    begun = perf_counter()
    while len(passes) < PASSES and not (passes and _late(group, clock, perf_counter() - begun)):
        passes.append(
            MachineProfile(
                Machine.current(group, device, optimizer),
                list(measure_lookups(group, clock, optimizer, pools)),
                [] if collectives_known else list(measure_collectives(group, clock)),
                list(measure_exchanges(group, clock, optimizer)),
            )
        )
    return MachineProfile.least(passes)


def measure_lookups(
    group: dist.ProcessGroup,
    clock: Clock,
    optimizer: EmbOptimType,
    pools: Mapping[tuple[int, float], npt.NDArray[np.int64]],
) -> Iterator[LookupSample]:
    """Measure forward, and backward with update, of TBEs; ``pools``: ids by rows and skew."""
    begin = partial(dist.barrier, group)
    for timed in timed_lookups(clock, optimizer, pools, TABLES, shapes=SHAPES, begin=begin):
        busy = [timed.forward[1], timed.backward[1], timed.distinct]
        forward, backward, distinct = _mean(group, clock, busy)
        yield LookupSample(
            timed.tables, timed.rows, timed.dim, timed.bags, timed.lookups, distinct, forward, backward
        )


def measure_collectives(group: dist.ProcessGroup, clock: Clock) -> Iterator[CollectiveSample]:
    """Measure each collective at several sizes."""
    for timed in timed_collectives(group, clock, BYTES):
        elapsed, busy = _mean(group, clock, timed.times)
        yield CollectiveSample(timed.collective, timed.bytes, elapsed, busy)


def _late(group: dist.ProcessGroup, clock: Clock, seconds: float) -> bool:
    """Whether a pass took too long on any rank."""
    longest = torch.tensor([seconds], dtype=torch.float64, device=clock.device)
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
    return float(longest) > PASS_SECONDS


def _mean(
    group: dist.ProcessGroup, clock: Clock, values: npt.NDArray[np.float64] | list[float]
) -> list[float]:
    """The mean over the ranks."""
    total = torch.tensor(values, dtype=torch.float64, device=clock.device)
    dist.all_reduce(total, group=group)
    mean: list[float] = (total / group.size()).tolist()
    return mean
