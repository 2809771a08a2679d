"""Micro-benchmarks of this machine: lookups, collectives, and steps of small sharded collections.

All ranks run the same benchmark at the same time, after a barrier, so that it includes contention for cores
and memory. On a CPU a rank's time is its process's CPU time, since waiting for others is not work. On CUDA it
is elapsed time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from recpipe_neo.machine_profile import COLLECTIVES, CollectiveSample, LookupSample, Machine, MachineProfile
from recpipe_neo.steps import measure_exchanges

TABLES = ((4, 100), (1, 5_000), (4, 5_000), (4, 100_000), (4, 300_000), (1, 1_000_000))
"""Numbers of equal tables in one TBE, and their rows: from sizes that fit any cache to sizes that mostly miss
all."""
DIMS = (16, 64)
SKEWS = (0.0, 1.05)
"""Exponents of the ids' Zipf distribution."""
SHAPES = ((512, 1), (4096, 1), (2048, 10), (512, 50), (4096, 10))
"""Numbers of bags of each table, and of lookups of each bag."""
POOL = 2**20
"""How many ids are drawn for a table size and skew. Batches are sections of them, so that rows recur
naturally."""
BYTES = (2**12, 2**16, 2**19, 2**22, 2**24)
PASSES = 2
"""Passes over all benchmarks. The faster time counts, since other programs may disturb for seconds."""
REPEATS = 5
CACHE = 2**24
"""Bytes read before each timed part, so that it finds cold caches, as after the rest of a training step."""


class Clock:
    """Measures milliseconds on ``device``: elapsed time, and time that this process is busy."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._other = torch.ones(CACHE // 4, device=device)

    def start(self) -> npt.NDArray[np.float64]:
        """Like ``read``, after filling the caches with other data."""
        self._other.sum()
        return self.read()

    def read(self) -> npt.NDArray[np.float64]:
        """(elapsed, busy) since a fixed moment, after all queued work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elapsed = time.perf_counter()
        busy = elapsed if self.device.type == "cuda" else time.process_time()
        return np.array([elapsed, busy]) * 1e3


def measure(group: dist.ProcessGroup, device: torch.device, optimizer: EmbOptimType) -> MachineProfile:
    """Run all benchmarks. Every rank of ``group`` must call this and gets the same profile.

    ``optimizer``: the tables' fused optimizer. A time is the median of a few repetitions, then the mean over
    the ranks, then the minimum over the passes.
    """
    clock = Clock(device)
    random = np.random.default_rng(group.rank())
    pools = {(rows, skew): zipf(random, rows, POOL, skew) for _, rows in TABLES for skew in SKEWS}
    passes = []
    for _ in range(PASSES):
        passes.append(
            MachineProfile(
                Machine.current(group, device, optimizer),
                list(measure_lookups(group, clock, optimizer, pools)),
                list(measure_collectives(group, clock)),
                list(measure_exchanges(group, clock, optimizer)),
            )
        )
    return MachineProfile.least(passes)


def zipf(random: np.random.Generator, rows: int, count: int, skew: float) -> npt.NDArray[np.int64]:
    """``count`` ids in [0, rows). The id of popularity rank r has a probability of about r ** -skew; popular
    ids are scattered over the table."""
    uniform = random.random(count)
    if skew == 0:
        rank = uniform * rows
    elif skew == 1:
        rank = rows**uniform - 1
    else:
        rank = ((rows ** (1 - skew) - 1) * uniform + 1) ** (1 / (1 - skew)) - 1
    return rank.astype(np.int64).clip(0, rows - 1) * 2_654_435_761 % rows


def measure_lookups(
    group: dist.ProcessGroup,
    clock: Clock,
    optimizer: EmbOptimType,
    pools: Mapping[tuple[int, float], npt.NDArray[np.int64]],
) -> Iterator[LookupSample]:
    """Measure forward, and backward with update, of TBEs over the grid above; ``pools``: ids by rows and
    skew."""
    for tables, rows in TABLES:
        for dim in DIMS:
            tbe = _tbe(tables, rows, dim, optimizer, clock.device)
            # All ids of a small table recur in every batch, so that skew changes nothing.
            for skew in SKEWS[: 1 if rows < SHAPES[0][0] else None]:
                for bags, lookups in SHAPES:
                    times, distinct = _lookup(group, clock, tbe, pools[rows, skew], (tables, bags, lookups))
                    forward, backward, distinct = _mean(group, clock, [*times, distinct])
                    yield LookupSample(tables, rows, dim, bags, bags * lookups, distinct, forward, backward)


def _tbe(
    tables: int, rows: int, dim: int, optimizer: EmbOptimType, device: torch.device
) -> SplitTableBatchedEmbeddingBagsCodegen:
    cuda = device.type == "cuda"
    place = (
        (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
        if cuda
        else (EmbeddingLocation.HOST, ComputeDevice.CPU)
    )
    tbe = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, *place)] * tables, optimizer=optimizer, learning_rate=0.01, device=device
    )
    tbe.init_embedding_weights_uniform(-0.1, 0.1)  # pages that were never written share one page of zeros
    return tbe


def _lookup(
    group: dist.ProcessGroup,
    clock: Clock,
    tbe: SplitTableBatchedEmbeddingBagsCodegen,
    pool: npt.NDArray[np.int64],
    shape: tuple[int, int, int],
) -> tuple[npt.NDArray[np.float64], float]:
    """Median busy ms of forward and backward, and one table's distinct rows per batch."""
    tables, bags, lookups = shape
    size = tables * bags * lookups
    offsets = torch.arange(0, size + 1, lookups, device=clock.device)
    times = []
    dist.barrier(group)
    for step in range(REPEATS):
        start = step * size % (len(pool) - size + 1)
        ids = torch.from_numpy(pool[start : start + size]).to(clock.device)
        begin = clock.start()
        pooled = tbe(ids, offsets)
        forward = clock.read() - begin
        begin = clock.start()
        pooled.backward(pooled.detach())
        times.append((forward[1], (clock.read() - begin)[1]))
    return np.median(times[2:], axis=0), len(np.unique(pool[: bags * lookups]))


def measure_collectives(group: dist.ProcessGroup, clock: Clock) -> Iterator[CollectiveSample]:
    """Measure each collective at several sizes."""
    world = group.size()
    for name in COLLECTIVES:
        for size in BYTES:
            count = size // 4 // world * world
            times = []
            for _ in range(24 if size < 2**22 else 8):
                run = _collective(name, count, group, clock.device)
                dist.barrier(group)
                before = clock.read()
                run()
                times.append(clock.read() - before)
            elapsed, busy = _mean(group, clock, np.median(times[3:], axis=0))
            yield CollectiveSample(name, count * 4, elapsed, busy)


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


def _mean(
    group: dist.ProcessGroup, clock: Clock, values: npt.NDArray[np.float64] | list[float]
) -> list[float]:
    """The mean over the ranks."""
    total = torch.tensor(values, dtype=torch.float64, device=clock.device)
    dist.all_reduce(total, group=group)
    mean: list[float] = (total / group.size()).tolist()
    return mean
