"""Rows in tiers: what a tiered step adds in recpipe's own threads, requests to cold stores, and codecs.

The steps are those of the real classes, over a store whose requests take no time. Stores are measured in host
memory and on the disk below the current directory, where runs put them. A store's time has two parts: what
its thread computes, and what it waits for. ``... busy`` is the processor time of the process in the same
request.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.common.device import one_thread
from recpipe.data.parts import in_order
from recpipe.data.select import select
from recpipe.plugin.bags import RowIds
from recpipe.plugin.policy import RowSpace
from recpipe.plugin.quantizer import RecordLayout, RowCodec
from recpipe.plugin.store import ColdStore, IoCounters, Records, Rows, StoreLayout
from recpipe.plugin.tables import Table, TableOptimizer, TableSet
from recpipe.profiling.limits import Sample
from recpipe.tables.stores.blocks import BLOCK_BYTES, BlockMap
from recpipe.tables.stores.codecs import Bf16Rows, Fp16Rows, Int8Rows
from recpipe.tables.stores.local import HostStore
from recpipe.tables.stores.ssd import SsdStore
from recpipe.tables.tiers.policies import POLICIES
from recpipe.tables.tiers.tiered import TieredEmbeddingBagCollection
from recpipe_perf_model.bench.lookups import zipf

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
WIDTHS = (17, 65)
"""Values of a stored record: dimensions 16 and 64 under row-wise Adagrad."""
BYTES = 96 << 20
"""About the size of each stored table."""
COUNTS = (48, 400, 3_000, 20_000)
"""Rows of a request."""
DENSE = (1, 12)
"""Rows are drawn from the whole table, or from a part of it so many times smaller, where they share more
blocks."""
REPEATS = 7
CODECS: dict[str, Callable[[RecordLayout], RowCodec]] = {"int8": Int8Rows, "fp16": Fp16Rows, "bf16": Bf16Rows}
LEAST = 1e-7
"""Seconds that a request is taken for that no clock could measure."""
Sizes = dict[str, float | str]


class NoStore(ColdStore):
    """Takes and gives rows without looking at them."""

    direct = None
    cold_bytes = overhead_bytes = 0

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


def measure_tiers(quick: bool) -> Iterator[Sample]:
    """Samples ``plan nocache``, ``plan lru``, ``plan lfu``, ``advance``, ``arrive``, ``slots forward`` and
    ``slots update`` (lookups in the one TBE whose slots all tables share), and ``reorder``: a batch and its
    plan with samples that need no cold row first."""
    random = np.random.default_rng(0)
    with one_thread():
        for rows in ROWS[:1] if quick else ROWS:
            own = rows // TABLES
            each = tuple(Table(f"t{number}", own, (f"f{number}",)) for number in range(TABLES))
            for lookups in LOOKUPS[::2] if quick else LOOKUPS:
                batches = [zipf(random, rows, lookups, SKEW) % own for _ in range(BATCHES)]
                for dim in DIMS[:1] if rows == max(ROWS) or quick else DIMS:
                    tables = TableSet(each, dim, TableOptimizer("rowwise_adagrad", 0.01), 0)
                    for policy in POLICIES:
                        for share in SHARES if policy != "nocache" else (0.0,):
                            yield from _timed_steps(policy, int(rows * share), tables, batches)


def _timed_steps(policy: str, slots: int, tables: TableSet, batches: list[RowIds]) -> Iterator[Sample]:
    store, space = NoStore(tables.layout), RowSpace(tables.layout.bases, slots)
    tier = TieredEmbeddingBagCollection(tables, POLICIES[policy](space), store, torch.device("cpu"), True)
    steps = []
    try:
        for ids in batches:
            # A bag has one id: those of the first table, then those of the second ...
            bags = len(ids) // TABLES * TABLES
            lengths = torch.ones(bags, dtype=torch.int64)
            sparse = KeyedJaggedTensor(list(tables.features), torch.from_numpy(ids[:bags]), lengths=lengths)
            steps.append(_timed_step(tier, sparse))
    finally:
        tier.cold.close()
    for kind in steps[0][0]:
        # The step with the median time; the sizes differ little between batches.
        counted = [(times[kind], sizes) for times, sizes in steps[-COUNTED:]]
        seconds, sizes = sorted(counted, key=lambda pair: pair[0])[COUNTED // 2]
        yield Sample(f"plan {policy}" if kind == "plan" else kind, sizes, seconds)


def _timed_step(
    tier: TieredEmbeddingBagCollection, sparse: KeyedJaggedTensor
) -> tuple[dict[str, float], Sizes]:
    """Seconds of each part of a step, through the four calls and an update, and the batch's sizes."""
    times: dict[str, float] = {}
    _evict_caches()
    began = time.perf_counter()
    rows = tier.input_dist(sparse)
    times["plan"] = time.perf_counter() - began
    tier.prefetch(rows)
    assert rows.fetched is not None, "just started"
    rows.fetched.result()
    slab_before = len(tier.occupied.slab)
    _evict_caches()
    began = time.perf_counter()
    tier.advance(rows)
    times["advance"] = time.perf_counter() - began
    began = time.perf_counter()
    tier.wait()
    times["arrive"] = time.perf_counter() - began
    tier.cold.flush()
    plan = rows.plan
    in_slab = int(np.count_nonzero(plan.where < 0))
    sizes: Sizes = {
        "lookups": float(plan.looked_up),
        "bags": float(rows.ids.stride() * len(tier.tables.features)),
        "rows": float(tier.tables.layout.total_rows),
        "slots": float(tier.slots),
        "dim": float(tier.tables.dim),
        "width": float(tier.tables.layout.width),
        "hits": float(plan.looked_up - in_slab),
        "hot": float(len(np.unique(plan.where[plan.where >= 0]))),
        "missed": float(len(plan.carried_from)),
        "leaving": float(slab_before + np.count_nonzero(plan.evicted >= 0)),
        "arriving": float(len(plan.fetch)),
        "slab": float(len(plan.slab)),
        "slab_lookups": float(in_slab),
    }
    _evict_caches()
    began = time.perf_counter()
    warm, cold = tier.compute(rows, True, True)
    assert warm is not None, "asked for"
    times["slots forward"] = time.perf_counter() - began
    gradient = torch.full_like(warm, 1e-3)
    _evict_caches()
    began = time.perf_counter()
    torch.autograd.backward(warm, gradient)
    if cold is not None:
        torch.autograd.backward(cold, gradient)
    times["slots update"] = time.perf_counter() - began
    order = np.argsort(rows.needs_cold, kind="stable")
    began = time.perf_counter()
    rows.arrange(order, int(np.count_nonzero(~rows.needs_cold)))
    rows.lookups.tiers()  # which a GPU makes
    in_order(select(sparse, order), tier.tables.features)
    times["reorder"] = time.perf_counter() - began
    return times, sizes


_OTHER = np.ones(1 << 21)


def _evict_caches() -> None:
    """Read other memory, as the rest of a step does."""
    _OTHER.sum()


def measure_stores(quick: bool) -> Iterator[Sample]:
    """Samples ``host read``, ``host write``; ``ssd read``, ``ssd write`` (of blocks just read), ``ssd
    rewrite`` (of others, which it reads first); each also as ``... busy``; ``encode`` and ``decode``."""
    widths, counts = (WIDTHS[:1], COUNTS[1:3]) if quick else (WIDTHS, COUNTS)
    for width in widths:
        layout = StoreLayout(("rows",), (BYTES // (4 * width),), width)

        def fill(table: str, start: int, stop: int, width: int = width) -> Records:
            return np.full((stop - start, width), 0.5, np.float32)

        store = HostStore(layout, fill)
        yield from _timed_requests(store, "host", counts)
        store.close()
        del store
        with tempfile.TemporaryDirectory(prefix="recpipe-perf-", dir=Path.cwd()) as folder:
            ssd = SsdStore.create(layout, fill, Path(folder) / "store", scratch=True)
            try:
                yield from _timed_requests(ssd, "ssd", counts)
            finally:
                ssd.close()
    for name, codec in CODECS.items():
        for width in widths:
            made = codec(RecordLayout(width - 1, width))
            for count in COUNTS[1:3] if quick else COUNTS[1:]:
                records = np.random.default_rng(0).normal(size=(count, width)).astype(np.float32)
                encoded, out = made.encode(records), np.empty_like(records)
                runs: dict[str, Callable[[], object]] = {
                    "encode": partial(made.encode, records),
                    "decode": partial(made.decode, encoded, out),
                }
                for what, run in runs.items():
                    seconds = float(np.median([_timed(run)[0] for _ in range(REPEATS)]))
                    yield Sample(f"{what} {name}", {"rows": float(count), "width": float(width)}, seconds)


def _timed_requests(store: HostStore | SsdStore, name: str, counts: tuple[int, ...]) -> Iterator[Sample]:
    """For each size several requests of different rows, in no order: read, then written; then, of an ssd,
    written when their blocks have left the staging area."""
    random, layout = np.random.default_rng(0), store.layout
    for count in counts:
        for among in (layout.total_rows // dense for dense in DENSE):
            if among <= 4 * count:
                continue
            requests = [random.choice(among, count, replace=False) for _ in range(REPEATS)]
            records = np.full((count, layout.width), 0.5, np.float32)
            times: dict[str, list[tuple[float, float]]] = {"read": [], "write": []}
            for rows in requests:
                times["read"].append(_timed(partial(store.gather, rows, records)))
                times["write"].append(_timed(partial(store.scatter, rows, records)))
            if isinstance(store, SsdStore):
                times["rewrite"] = []
                for rows in requests:
                    store.forget_staged()
                    times["rewrite"].append(_timed(partial(store.scatter, rows, records)))
            at = sizes(layout, requests[0])  # those of the other requests differ little
            for what, found in times.items():
                if what != "read":
                    at = {**at, "blocks": at["own_blocks"], "requests": at["own_requests"]}
                elapsed, busy = np.median(found[1:], axis=0)
                yield Sample(f"{name} {what}", at, max(LEAST, float(elapsed)))
                yield Sample(f"{name} {what} busy", at, max(LEAST, float(busy)))


def sizes(layout: StoreLayout, rows: Rows) -> Sizes:
    """What an ssd store moves for distinct ``rows``: 4 KiB blocks and requests to read them, with those that
    alone lie between two, and ``own_blocks`` and ``own_requests`` to write them."""
    blocks = BlockMap(layout)
    wanted = np.unique(blocks.places(rows).blocks)
    bridged = blocks.bridged(wanted)
    each = blocks.block_bytes // BLOCK_BYTES
    return {
        "rows": float(len(rows)),
        "width": float(layout.width),
        "bytes": float(4 * layout.width * layout.total_rows),
        "blocks": float(each * len(bridged)),
        "requests": float(1 + np.count_nonzero(np.diff(bridged) != 1)),
        "own_blocks": float(each * len(wanted)),
        "own_requests": float(1 + np.count_nonzero(np.diff(wanted) != 1)),
    }


def _timed(run: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and processor seconds of the process."""
    began, busy = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - began, time.process_time() - busy
