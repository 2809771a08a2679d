"""Rows as plain arrays, which tables have that several trainers share: looked up, and updated, without
FBGEMM's fused kernels (``recpipe.tables.rows``)."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import torch

from recpipe.common.device import one_thread
from recpipe.plugin.bags import IndexBags, RowIds
from recpipe.plugin.tables import TableOptimizer
from recpipe.profiling.limits import Sample
from recpipe.tables.rows import RowBags, updated
from recpipe_perf_model.bench.lookups import POOL, least, zipf

SHAPES = ((26, 64, 1), (26, 512, 1), (8, 2048, 1), (26, 1024, 1), (4, 512, 20))
"""Features, samples, and ids of a bag."""
SPREADS = ((2_000, 0.0), (250_000, 1.05), (250_000, 0.0))
"""Rows, and the skew with which they are looked up."""
DIMS = (16, 64)
REPEATS = 6


def measure(quick: bool) -> Iterator[Sample]:
    """The least of several passes over ``once``."""
    yield from least(once, quick)


def once(quick: bool) -> Iterator[Sample]:
    """Samples ``rows look up`` (with finding each row's bags) and ``rows update`` (gradients of the distinct
    rows, and their step of row-wise Adagrad), in one thread."""
    random = np.random.default_rng(0)
    shapes, dims = (SHAPES[:2], DIMS[:1]) if quick else (SHAPES, DIMS)
    with one_thread():
        for rows, skew in SPREADS:
            pool = zipf(random, rows, POOL, skew)
            for dim in dims:
                table = torch.full((rows, dim), 0.01), torch.full((rows, 1), 0.01)
                for shape in shapes:
                    yield from _timed(pool, *table, *shape)


def _timed(
    pool: RowIds, weights: torch.Tensor, state: torch.Tensor, features: int, samples: int, ids: int
) -> Iterator[Sample]:
    size, dim = features * samples * ids, weights.shape[1]
    optimizer = TableOptimizer("rowwise_adagrad", 0.01)
    offsets = np.arange(0, size + 1, ids)
    times, distinct = [], 0
    for step in range(REPEATS):
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
    sizes = {"lookups": size, "bags": features * samples, "distinct": distinct, "dim": dim}
    found: dict[str, float | str] = {name: float(value) for name, value in sizes.items()}
    for kind, seconds in zip(("rows look up", "rows update"), np.median(times[1:], axis=0), strict=True):
        yield Sample(kind, found, float(seconds))
