"""Lookups of embedding rows and their updates: by FBGEMM's fused kernels, and of rows as plain arrays.

Neo's planner runs the benchmark of fused lookups on all of its ranks at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from numpy.typing import NDArray
from torch import nn

from recpipe.common.device import one_thread
from recpipe.plugin.bags import IndexBags, RowIds
from recpipe.plugin.tables import OPTIMIZERS, TableOptimizer
from recpipe.profiling.limits import Sample
from recpipe.tables.rows import RowBags, updated

LOOKUP_TABLES = ((4, 100), (1, 5_000), (4, 5_000), (16, 20_000), (4, 100_000), (4, 300_000), (1, 1_000_000))
"""Numbers of equal tables in one TBE, and their rows: from sizes that fit any cache to sizes that mostly miss
all."""
DIMS = (16, 64)
SKEWS = (0.0, 1.05)
"""Exponents of the ids' Zipf distribution."""
LOOKUP_SHAPES = ((512, 1), (4096, 1), (2048, 10), (512, 50), (4096, 10))
"""Numbers of bags of each table, and of lookups of each bag."""
POOL = 2**20
"""How many ids are drawn for a table size and skew. Batches are sections of them, so that rows recur
naturally."""
REPEATS = 5
CACHE = 2**24
"""Bytes read before each timed part, so that it finds cold caches, as after the rest of a training step."""
OPTIMIZER = "rowwise_adagrad"
"""recpipe's default."""
PASSES = 3
ROW_SHAPES = ((26, 64, 1), (26, 512, 1), (8, 2048, 1), (26, 1024, 1), (4, 512, 20))
"""Of plain rows: features, samples, and ids of a bag."""
ROW_SPREADS = ((2_000, 0.0), (250_000, 1.05), (250_000, 0.0))
"""Numbers of plain rows, and the skew with which they are looked up."""
ROW_REPEATS = 6


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
class TimedLookups:
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


def least(once: Callable[[bool], Iterator[Sample]], quick: bool) -> Iterator[Sample]:
    """The least time of each sample of ``once`` over ``PASSES`` passes, which give the same samples; in the
    quick form there is one pass."""
    passes = [list(once(quick)) for _ in range(1 if quick else PASSES)]
    for same in zip(*passes, strict=True):
        yield replace(same[0], seconds=min(sample.seconds for sample in same))


def measure_lookups(quick: bool) -> Iterator[Sample]:
    """Samples ``lookup forward`` and ``lookup update``, in one process on the CPU."""
    clock = Clock(torch.device("cpu"))
    tables, dims, shapes = (
        (LOOKUP_TABLES[1:4:2], DIMS[:1], LOOKUP_SHAPES[:3]) if quick else (LOOKUP_TABLES, DIMS, LOOKUP_SHAPES)
    )
    drawn = id_pools(np.random.default_rng(0), [rows for _, rows in tables])
    with one_thread():  # as in a run, where the other cores have work of their own
        for timed in timed_lookups(clock, OPTIMIZERS[OPTIMIZER], drawn, tables, dims, shapes):
            names = ("tables", "rows", "dim", "bags", "lookups", "distinct")
            at = {name: float(getattr(timed, name)) for name in names} | {"optimizer": OPTIMIZER}
            yield Sample("lookup forward", at, float(timed.forward[0]) / 1e3)
            yield Sample("lookup update", at, float(timed.backward[0]) / 1e3)


def id_pools(random: np.random.Generator, tables: list[int]) -> dict[tuple[int, float], RowIds]:
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
    tables: tuple[tuple[int, int], ...] = LOOKUP_TABLES,
    dims: tuple[int, ...] = DIMS,
    shapes: tuple[tuple[int, int], ...] = LOOKUP_SHAPES,
    begin: Callable[[], object] = lambda: None,
    skews: tuple[float, ...] = SKEWS,
    make: Callable[[int, int, int], nn.Module] | None = None,
) -> Iterator[TimedLookups]:
    """Time forward, and backward with update, of TBEs over the grid. ``begin`` is called before each point.
    ``make``: what makes a TBE of so many tables with so many rows of a dimension; None: FBGEMM's own with
    ``optimizer``."""
    make = partial(_tbe, clock.device, optimizer) if make is None else make
    for count, rows in tables:
        for dim in dims:
            tbe = make(count, rows, dim)
            # All ids of a small table recur in every batch, so that skew changes nothing.
            for skew in skews[: 1 if rows < shapes[0][0] else None]:
                for bags, lookups in shapes:
                    begin()
                    pool = pools[rows, skew]
                    forward, backward = _timed(clock, tbe, pool, count * bags * lookups, lookups)
                    distinct = len(np.unique(pool[: bags * lookups]))
                    yield TimedLookups(count, rows, dim, bags, bags * lookups, distinct, forward, backward)


def _tbe(device: torch.device, optimizer: EmbOptimType, count: int, rows: int, dim: int) -> nn.Module:
    place, kind = (
        (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
        if device.type == "cuda"
        else (EmbeddingLocation.HOST, ComputeDevice.CPU)
    )
    made: nn.Module = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, place, kind)] * count, optimizer=optimizer, learning_rate=0.01, device=device
    )
    written(made)
    return made


def written(tbe: SplitTableBatchedEmbeddingBagsCodegen) -> None:
    """Write all rows: pages that were never written share one page of zeros."""
    tbe.init_embedding_weights_uniform(-0.1, 0.1)


def _timed(clock: Clock, tbe: nn.Module, pool: RowIds, size: int, of_bag: int) -> NDArray[np.float64]:
    """Median milliseconds of ``size`` lookups, ``of_bag`` in each bag, and of their backward pass: [2, 2]."""
    offsets = torch.arange(0, size + 1, of_bag, device=clock.device)
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
    return np.asarray(np.median(times[2:], axis=0))


def measure_rows(quick: bool) -> Iterator[Sample]:
    """Samples ``rows look up`` (with finding each row's bags) and ``rows update`` (gradients of the distinct
    rows, and their step of row-wise Adagrad), in one thread.

    They are of rows as plain arrays, which tables have that several trainers share
    (``recpipe.tables.rows``).
    """
    random = np.random.default_rng(0)
    shapes, dims = (ROW_SHAPES[:2], DIMS[:1]) if quick else (ROW_SHAPES, DIMS)
    with one_thread():
        for rows, skew in ROW_SPREADS:
            pool = zipf(random, rows, POOL, skew)
            for dim in dims:
                weights, state = torch.full((rows, dim), 0.01), torch.full((rows, 1), 0.01)
                for features, samples, ids in shapes:
                    size = features * samples * ids
                    offsets = np.arange(0, size + 1, ids)
                    *seconds, distinct = _timed_rows(pool, weights, state, samples, offsets)
                    sizes = {"lookups": size, "bags": features * samples, "distinct": distinct, "dim": dim}
                    at: dict[str, float | str] = {name: float(value) for name, value in sizes.items()}
                    for kind, taken in zip(("rows look up", "rows update"), seconds, strict=True):
                        yield Sample(kind, at, taken)


def _timed_rows(
    pool: RowIds, weights: torch.Tensor, state: torch.Tensor, samples: int, offsets: NDArray[np.int64]
) -> tuple[float, float, int]:
    """Median seconds of looking rows up and of updating them, and how many of the last batch are distinct."""
    size, dim = int(offsets[-1]), weights.shape[1]
    optimizer = TableOptimizer("rowwise_adagrad", 0.01)
    times, distinct = [], 0
    for step in range(ROW_REPEATS):
        start = step * size % (len(pool) - size + 1)
        began = time.perf_counter()
        bags = RowBags.of(IndexBags(pool[start : start + size], offsets, samples))
        at = torch.from_numpy(bags.distinct)
        pooled = bags.pooled(weights, at)
        looked_up = time.perf_counter()
        gradients = bags.gradients(pooled, dim)
        records = updated(optimizer, torch.cat((weights[at], state[at]), dim=1), gradients)
        weights.index_copy_(0, at, records[:, :dim])
        state.index_copy_(0, at, records[:, dim:])
        times.append((looked_up - began, time.perf_counter() - looked_up))
        distinct = len(at)
    looking, updating = np.median(times[1:], axis=0)
    return float(looking), float(updating), distinct
