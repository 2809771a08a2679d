"""Lookups of embedding rows and their fused updates: by rows, dimension, pooling, skew and cache residency.

Neo's planner runs the same benchmark on all of its ranks at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from numpy.typing import NDArray

from recpipe.common.device import one_thread
from recpipe.plugin.bags import RowIds
from recpipe.plugin.tables import OPTIMIZERS
from recpipe.profiling.limits import Sample

TABLES = ((4, 100), (1, 5_000), (4, 5_000), (16, 20_000), (4, 100_000), (4, 300_000), (1, 1_000_000))
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
REPEATS = 5
CACHE = 2**24
"""Bytes read before each timed part, so that it finds cold caches, as after the rest of a training step."""
OPTIMIZER = "rowwise_adagrad"
"""The optimizer of ``measure``: recpipe's default."""


class Clock:
    """Measures milliseconds on ``device``: elapsed time, and time that this process is busy."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._other = torch.ones(CACHE // 4, device=device)

    def start(self) -> NDArray[np.float64]:
        """Like ``read``, after filling the caches with other data."""
        self._other.sum()
        return self.read()

    def read(self) -> NDArray[np.float64]:
        """(elapsed, busy) since a fixed moment, after all queued work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elapsed = time.perf_counter()
        busy = elapsed if self.device.type == "cuda" else time.process_time()
        return np.array([elapsed, busy]) * 1e3


@dataclass(frozen=True)
class Timed:
    """One TBE's lookups: ``tables`` equal tables; bags, lookups and distinct rows are of each table."""

    tables: int
    rows: int
    dim: int
    bags: int
    lookups: int
    distinct: float
    forward: NDArray[np.float64]
    """Elapsed and busy milliseconds of the lookups, medians."""
    backward: NDArray[np.float64]
    """The same of the backward pass with its update."""


def measure(quick: bool) -> Iterator[Sample]:
    """The least of several passes over ``once``."""
    yield from least(once, quick)


def once(quick: bool) -> Iterator[Sample]:
    """Samples ``lookup forward`` and ``lookup update``, in one process on the CPU."""
    clock = Clock(torch.device("cpu"))
    tables, dims, shapes = (TABLES[1:4:2], DIMS[:1], SHAPES[:3]) if quick else (TABLES, DIMS, SHAPES)
    with one_thread():  # as in a run, where the other cores have work of their own
        for timed in timed_lookups(clock, OPTIMIZERS[OPTIMIZER], _drawn(tables), tables, dims, shapes):
            names = ("tables", "rows", "dim", "bags", "lookups", "distinct")
            at = {name: float(getattr(timed, name)) for name in names} | {"optimizer": OPTIMIZER}
            yield Sample("lookup forward", at, float(timed.forward[0]) / 1e3)
            yield Sample("lookup update", at, float(timed.backward[0]) / 1e3)


def _drawn(tables: tuple[tuple[int, int], ...]) -> dict[tuple[int, float], RowIds]:
    return pools(np.random.default_rng(0), [rows for _, rows in tables])


def pools(random: np.random.Generator, tables: list[int]) -> dict[tuple[int, float], RowIds]:
    """Ids to look up, by a table's rows and skew."""
    return {(rows, skew): zipf(random, rows, POOL, skew) for rows in tables for skew in SKEWS}


def zipf(random: np.random.Generator, rows: int, count: int, skew: float) -> RowIds:
    """``count`` ids in [0, rows). The id of popularity rank r has a probability of about r ** -skew; popular
    ids are scattered over the table."""
    uniform = random.random(count)
    if skew == 0:
        rank = uniform * rows
    elif skew == 1:
        rank = rows**uniform - 1
    else:
        rank = ((rows ** (1 - skew) - 1) * uniform + 1) ** (1 / (1 - skew)) - 1
    scattered: RowIds = rank.astype(np.int64).clip(0, rows - 1) * 2_654_435_761 % rows
    return scattered


def timed_lookups(
    clock: Clock,
    optimizer: EmbOptimType,
    pools: Mapping[tuple[int, float], RowIds],
    tables: tuple[tuple[int, int], ...] = TABLES,
    dims: tuple[int, ...] = DIMS,
    shapes: tuple[tuple[int, int], ...] = SHAPES,
    begin: Callable[[], object] = lambda: None,
    skews: tuple[float, ...] = SKEWS,
) -> Iterator[Timed]:
    """Time forward, and backward with update, of TBEs over the grid. ``begin`` is called before each
    point."""
    for count, rows in tables:
        for dim in dims:
            tbe = _tbe(count, rows, dim, optimizer, clock.device)
            # All ids of a small table recur in every batch, so that skew changes nothing.
            for skew in skews[: 1 if rows < shapes[0][0] else None]:
                for bags, lookups in shapes:
                    begin()
                    yield _timed(clock, tbe, pools[rows, skew], (count, rows, dim, bags, lookups))


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


def _timed(
    clock: Clock,
    tbe: SplitTableBatchedEmbeddingBagsCodegen,
    pool: RowIds,
    shape: tuple[int, int, int, int, int],
) -> Timed:
    tables, rows, dim, bags, lookups = shape
    size = tables * bags * lookups
    offsets = torch.arange(0, size + 1, lookups, device=clock.device)
    times = []
    for step in range(REPEATS):
        start = step * size % (len(pool) - size + 1)
        ids = torch.from_numpy(pool[start : start + size]).to(clock.device)
        began = clock.start()
        pooled = tbe(ids, offsets)
        forward = clock.read() - began
        began = clock.start()
        pooled.backward(pooled.detach())
        times.append((forward, clock.read() - began))
    forward, backward = np.median(times[2:], axis=0)
    distinct = len(np.unique(pool[: bags * lookups]))
    return Timed(tables, rows, dim, bags, bags * lookups, distinct, forward, backward)


PASSES = 3


def least(once: Callable[[bool], Iterator[Sample]], quick: bool) -> Iterator[Sample]:
    """The least time of each sample of ``once``, which gives the same ones in each pass; in the quick form
    there is one pass."""
    passes = [once(quick) for _ in range(1 if quick else PASSES)]
    first = list(passes[0])
    others = [list(each) for each in passes[1:]]
    for number, sample in enumerate(first):
        times = [sample.seconds, *(each[number].seconds for each in others)]
        yield replace(sample, seconds=min(times))
