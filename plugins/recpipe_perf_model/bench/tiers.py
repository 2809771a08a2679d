"""What a tiered step adds in recpipe's own threads: planning, and moving rows between slots, slab and
buffers. The real classes do it, over a store whose requests take no time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.common.device import one_thread
from recpipe.data.parts import in_order
from recpipe.data.select import select
from recpipe.plugin.bags import RowIds
from recpipe.plugin.policy import RowSpace
from recpipe.plugin.store import ColdStore, IoCounters, Records, Rows, StoreLayout
from recpipe.plugin.tables import Table, TableOptimizer, TableSet
from recpipe.profiling.limits import Sample
from recpipe.tables.tiers.engine import TieredRows
from recpipe.tables.tiers.policies import POLICIES
from recpipe.tables.tiers.tiered import TieredEmbeddingBagCollection
from recpipe_perf_model.bench.lookups import least, zipf

ROWS = (60_000, 2_000_000)
LOOKUPS = (2_000, 12_000, 50_000)
"""Lookups of a batch in all tables."""
DIMS = (16, 64)
SHARES = (0.02, 0.2)
"""Shares of the rows that have slots."""
TABLES = 8
SKEW = 1.05
BATCHES = 9
"""Batches of each setting ..."""
COUNTED = 5
"""... of which the last ones count."""


class NoStore(ColdStore):
    """Takes and gives rows without looking at them."""

    direct = None

    def __init__(self, layout: StoreLayout) -> None:
        self.layout, self.io = layout, IoCounters()

    def gather(self, rows: Rows, out: Records) -> None:
        """Leave ``out`` as it is, but touch its pages as a store does."""
        out.fill(0.0)

    def scatter(self, rows: Rows, records: Records) -> None:
        """Forget them."""

    def flush(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""

    @property
    def cold_bytes(self) -> int:
        """None."""
        return 0

    @property
    def overhead_bytes(self) -> int:
        """None."""
        return 0


def measure(quick: bool) -> Iterator[Sample]:
    """The least of several passes over ``once``."""
    yield from least(once, quick)


def once(quick: bool) -> Iterator[Sample]:
    """Samples ``plan nocache``, ``plan lru``, ``plan lfu``, ``advance``, ``arrive``, ``slots forward`` and
    ``slots update`` (lookups in the one TBE whose slots all tables share), and ``reorder``: a batch and its
    plan with samples that need no cold row first."""
    random = np.random.default_rng(0)
    with one_thread():
        for rows in ROWS[:1] if quick else ROWS:
            for lookups in LOOKUPS[::2] if quick else LOOKUPS:
                ids = [zipf(random, rows, lookups, SKEW) for _ in range(BATCHES)]
                for dim in DIMS[:1] if rows == max(ROWS) or quick else DIMS:
                    for policy in POLICIES:
                        for share in SHARES if policy != "nocache" else (0.0,):
                            yield from _timed(policy, int(rows * share), rows, dim, ids)


def _timed(policy: str, slots: int, rows: int, dim: int, batches: list[RowIds]) -> Iterator[Sample]:
    tables = _tables(rows, dim)
    space = RowSpace(tables.layout.bases, slots)
    tier = TieredEmbeddingBagCollection(
        tables, POLICIES[policy](space), NoStore(tables.layout), torch.device("cpu"), True
    )
    found: list[list[Sample]] = []
    try:
        for ids in batches:
            found.append(_step(tier, policy, _bags(tables, ids)))
    finally:
        tier.cold.close()
    # The median of each time; the sizes differ little between batches.
    for same in zip(*found[-COUNTED:], strict=True):
        yield sorted(same, key=lambda sample: sample.seconds)[len(same) // 2]


def _tables(rows: int, dim: int) -> TableSet:
    each = tuple(Table(f"t{number}", rows // TABLES, (f"f{number}",)) for number in range(TABLES))
    return TableSet(each, dim, TableOptimizer("rowwise_adagrad", 0.01), 0)


def _bags(tables: TableSet, ids: RowIds) -> KeyedJaggedTensor:
    """One id in each bag: ``ids`` of the first table, then those of the second ..."""
    own = tables.layout.rows[0]
    size = len(ids) // TABLES
    values = torch.from_numpy(ids[: size * TABLES] % own)
    return KeyedJaggedTensor(
        list(tables.features), values, lengths=torch.ones(size * TABLES, dtype=torch.int64)
    )


def _step(tier: TieredEmbeddingBagCollection, policy: str, sparse: KeyedJaggedTensor) -> list[Sample]:
    """Take a batch through the four calls and an update."""
    _evict_caches()
    began = time.perf_counter()
    rows = tier.input_dist(sparse)
    planned = time.perf_counter() - began
    tier.prefetch(rows)
    assert rows.fetched is not None, "just started"
    rows.fetched.result()
    slab_before = len(tier.occupied.slab)
    _evict_caches()
    began = time.perf_counter()
    tier.advance(rows)
    advanced = time.perf_counter() - began
    began = time.perf_counter()
    tier.wait()
    arrived = time.perf_counter() - began
    tier.cold.flush()
    sizes = _sizes(tier, rows, slab_before)
    forward, update = _looked_up(tier, rows)
    order = np.argsort(rows.needs_cold, kind="stable")
    began = time.perf_counter()
    rows.arrange(order, int(np.count_nonzero(~rows.needs_cold)))
    rows.lookups.tiers()  # which a GPU makes
    in_order(select(sparse, order), tier.tables.features)
    reordered = time.perf_counter() - began
    return [
        Sample("reorder", sizes, reordered),
        Sample(f"plan {policy}", sizes, planned),
        Sample("advance", sizes, advanced),
        Sample("arrive", sizes, arrived),
        Sample("slots forward", sizes, forward),
        Sample("slots update", sizes, update),
    ]


def _looked_up(tier: TieredEmbeddingBagCollection, rows: TieredRows) -> tuple[float, float]:
    """Seconds to look up both tiers, and to update them."""
    _evict_caches()
    began = time.perf_counter()
    warm, cold = tier.compute(rows, True, True)
    assert warm is not None, "asked for"
    forward = time.perf_counter() - began
    gradient = torch.full_like(warm, 1e-3)
    _evict_caches()
    began = time.perf_counter()
    torch.autograd.backward(warm, gradient)
    if cold is not None:
        torch.autograd.backward(cold, gradient)
    return forward, time.perf_counter() - began


def _sizes(tier: TieredEmbeddingBagCollection, rows: TieredRows, slab_before: int) -> dict[str, float | str]:
    plan, in_slab = rows.plan, rows.lookups.slab_lookups
    evicted = int(np.count_nonzero(plan.evicted >= 0))
    return {
        "lookups": float(plan.looked_up),
        "bags": float(rows.ids.stride() * len(tier.tables.features)),
        "rows": float(tier.tables.layout.total_rows),
        "slots": float(tier.slots),
        "dim": float(tier.tables.dim),
        "width": float(tier.tables.layout.width),
        "hits": float(plan.looked_up - in_slab),
        "hot": float(rows.lookups.distinct_slots),
        "missed": float(len(plan.arrivals)),
        "leaving": float(slab_before + evicted),
        "arriving": float(len(plan.fetch)),
        "slab": float(len(plan.slab)),
        "slab_lookups": float(in_slab),
    }


_OTHER = np.ones(1 << 21)


def _evict_caches() -> None:
    """Read other memory, as the rest of a step does."""
    _OTHER.sum()
