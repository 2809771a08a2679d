"""recpipe's own loops on a CPU: pairs and crosses at drawn sizes, lookups and updates of rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import partial

import numpy as np
import torch
from torch import nn

from recpipe.backend.crosses import crossed, uncrossed
from recpipe.backend.pairs import gradients, products
from recpipe.common.device import using_threads
from recpipe.common.loops import can_compile
from recpipe.plugin.tables import OPTIMIZERS, SparseFeature, TableOptimizer, TableSet
from recpipe.profiling.limits import Sample
from recpipe.tables.collection import fused_tbe
from recpipe_perf_model.bench.lookups import (
    DIMS,
    LOOKUP_SHAPES,
    LOOKUP_TABLES,
    OPTIMIZER,
    Clock,
    id_pools,
    timed_lookups,
    written,
)
from recpipe_perf_model.bench.operators import FEATURES, MOST, SAMPLES, uniform_log2
from recpipe_perf_model.bench.timing import Make, OperatorClock
from recpipe_perf_model.kernels.models import LOOPS
from recpipe_perf_model.kernels.operators import Operator, watched

INTERACTIONS, CROSSES = 36, 24
"""How many interactions and layers of crosses are drawn."""
PAIR_DIMS = (8, 12, 16, 24, 32, 48, 64, 128)
WIDTHS = (128, 256, 432, 512, 864, 1024, 1728, 3456)
"""Of crosses."""


def measure_loops(quick: bool) -> Iterator[Sample]:
    """Samples of ``LOOPS``, and ``loop lookup forward`` and ``loop lookup update``, each with all threads and
    with one; none where loops stay Python."""
    if not can_compile():
        return
    share, random = 4 if quick else 1, np.random.default_rng(5)
    with closing(OperatorClock()) as clock, torch.no_grad():
        makes = [make for _ in range(INTERACTIONS // share) for make in pairs(random)]
        makes += [make for _ in range(CROSSES // share) for make in crosses(random)]
        yield from clock.timed([(loop_of(make), make) for make in makes])
    yield from _measure_lookups(quick)


def loop_of(make: Make) -> Operator:
    """The loop that a made call runs, among what prepares its memory."""
    return next(each for each in watched(make()) if each.kind in LOOPS)


def pairs(random: np.random.Generator) -> list[Make]:
    """Both passes of an interaction of drawn sizes."""
    samples, features = max(16, uniform_log2(random, SAMPLES) // 16 * 16), uniform_log2(random, FEATURES)
    dim = int(random.choice(PAIR_DIMS))
    samples = min(samples, max(16, MOST // (features * dim)))
    width = dim + features * (features + 1) // 2

    def given() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(samples, dim), torch.ones(samples, features, dim)

    return [
        lambda: partial(products, *given()),
        lambda: partial(gradients, *given(), torch.ones(samples, width), False),
    ]


def crosses(random: np.random.Generator) -> list[Make]:
    """Both passes of what a layer of crosses does beside its products, of drawn sizes."""
    width = int(random.choice(WIDTHS))
    samples = min(max(16, uniform_log2(random, SAMPLES) // 16 * 16), max(16, MOST // width))

    def some() -> torch.Tensor:
        return torch.ones(samples, width)

    return [
        lambda: partial(crossed, some(), some(), some(), torch.ones(width)),
        lambda: partial(uncrossed, some(), some(), some(), torch.ones(width), some(), False),
    ]


def _measure_lookups(quick: bool) -> Iterator[Sample]:
    clock, every = Clock(torch.device("cpu")), torch.get_num_threads()
    tables, dims, shapes = (
        (LOOKUP_TABLES[1:4:2], DIMS[:1], LOOKUP_SHAPES[:3]) if quick else (LOOKUP_TABLES, DIMS, LOOKUP_SHAPES)
    )
    drawn = id_pools(np.random.default_rng(0), [rows for _, rows in tables])
    for threads in sorted({1, every}):
        with using_threads(threads):
            grid = (OPTIMIZERS[OPTIMIZER], drawn, tables, dims, shapes)
            for timed in timed_lookups(clock, *grid, make=_tables):
                names = ("tables", "rows", "dim", "bags", "lookups", "distinct")
                at: dict[str, float | str] = {name: float(getattr(timed, name)) for name in names}
                at |= {"optimizer": OPTIMIZER, "threads": float(threads)}
                yield Sample("loop lookup forward", at, float(timed.forward[0]) / 1e3)
                yield Sample("loop lookup update", at, float(timed.backward[0]) / 1e3)


def _tables(count: int, rows: int, dim: int) -> nn.Module:
    """Equal tables, which loops look up."""
    features = [SparseFeature(f"f{number}", rows) for number in range(count)]
    made = TableSet.one_each(features, dim, TableOptimizer(OPTIMIZER, 0.01), 0)
    made.kernel.faster = lambda: True
    tbe = fused_tbe(made, [rows] * count, range(count), torch.device("cpu"), pooled=True)
    written(tbe)
    found: nn.Module = tbe
    return found
