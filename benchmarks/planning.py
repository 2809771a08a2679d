"""What the host does to plan a batch of the GPU benchmark's ids, told every lookup or the distinct rows.

    python benchmarks/planning.py [--runs 5] [--batches 60] [--sizes 8192 65536]

With every lookup, it begins with the ids (as a CPU plans, and as a GPU's batches were planned before); with
distinct rows, with those and their numbers, as a GPU returns them. A tenth of the rows has slots. Every
figure is a median over runs of a run's median batch, in milliseconds, with the lowest and the highest; the
runs of all cases take turns. Planning has one thread. BagPipe looks 16 batches ahead; its reader, a thread of
its own that has read them before, is not counted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from recpipe.plugin.bags import Bags

sys.path.insert(0, str(Path(__file__).with_name("on_gpu")))

from recpipe_bagpipe.policy import Lookahead, NoBulk
from recpipe_bagpipe.window import Pace
from recpipe_hotline.policy import Learning, PopularRows
from work import Size, batches

from recpipe.common.loops import ALONE
from recpipe.plugin.policy import CachePolicy, RowSpace
from recpipe.plugin.tables import SparseFeature, TableOptimizer, TableSet
from recpipe.tables.rows import table_bags
from recpipe.tables.tiers.gpu_lookups import Finder, GpuBags
from recpipe.tables.tiers.lookups import parted
from recpipe.tables.tiers.planner import TierPlanner
from recpipe.tables.tiers.policies import Lfu, Lru
from recpipe.tables.tiers.transfer import Transfer

LEARNING = Learning(learn_batches=20, growth=2.0, relearn_every=2000, sample=1.0, decay=2)


def lookahead(space: RowSpace) -> Lookahead:
    """BagPipe's policy, for which nothing is read in advance."""
    pace = Pace(16, memory=0, record_bytes=0, waited=lambda: 0.0)
    return Lookahead(space, lambda bags: bags.indices, NoBulk(), pace)


POLICIES: dict[str, Callable[[RowSpace], CachePolicy]] = {
    "lru": Lru,
    "lfu": Lfu,
    "hotline": lambda space: PopularRows(space, LEARNING),
    "bagpipe": lookahead,
}
Given = Callable[[], Bags | GpuBags]


def run(tables: TableSet, policy: str, given: list[Given], distinct: list[GpuBags]) -> float:
    """Milliseconds of the median batch of the later half, when the slots are full; ``distinct``: of the same
    batches, for who looks ahead."""
    bases = tables.layout.bases
    made = POLICIES[policy](RowSpace(bases, int(bases[-1]) // 10))
    planner = TierPlanner(made, carry=True)
    read: Any = made.stream(iter(distinct)) if isinstance(made, Lookahead) else distinct  # type: ignore[arg-type]
    times = []
    for _, bags in zip(read, given, strict=True):
        start = perf_counter()
        own = bags()
        plan = planner.plan(own)
        planner.commit()
        if isinstance(own, Bags):
            parted(own, plan.where, pooled=True)
        times.append(1e3 * (perf_counter() - start))
    return median(times[len(times) // 2 :])


def compare(size: Size, runs: int) -> None:
    """Print both forms of each policy for batches of ``size``."""
    features = [SparseFeature(name, rows) for name, rows in size.tables.items()]
    tables = TableSet.one_each(features, size.dim, TableOptimizer("rowwise_adagrad", 0.1), 0)
    finder = Finder(tables, Transfer(torch.device("cpu")), ALONE)
    ids = [batch.sparse_features for batch in batches(size)]
    distinct = [finder.bags(each) for each in ids]
    rows = median(len(bags.rows) for bags in distinct)
    print(f"batches of {size.batch:,}: {len(distinct[0]):,} lookups of {rows:,.0f} distinct rows")
    forms: dict[str, list[Given]] = {
        "every lookup": [lambda each=each: table_bags(tables, each) for each in ids],  # type: ignore[misc]
        "distinct rows": [lambda bags=bags: replace(bags) for bags in distinct],  # type: ignore[misc]
    }
    cases = [(policy, form) for policy in POLICIES for form in forms]
    times: dict[tuple[str, str], list[float]] = {case: [] for case in cases}
    for _ in range(runs):
        for policy, form in cases:
            times[policy, form].append(run(tables, policy, forms[form], distinct))
    for (policy, form), own in times.items():
        print(f"  {policy:8} {form:14} {median(own):7.2f} ms ({min(own):.2f}..{max(own):.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--sizes", type=int, nargs="+", default=[8192, 65_536])
    given = parser.parse_args()
    for size in given.sizes:
        compare(Size(dim=64, batch=size, steps=given.batches), given.runs)


if __name__ == "__main__":
    main()
