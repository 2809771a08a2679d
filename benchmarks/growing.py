"""Ids that grow beside ids that are hashed into a fixed table: a batch's lookup, memory, and pauses.

    python benchmarks/growing.py [--rows 2000000] [--dim 16] [--features 8] [--batch 8192] [--batches 40]

``lookup``: milliseconds of a batch from its keys to its pooled rows, all ids known: hashed and looked up in a
fixed table, and planned by the map and looked up in a table that grows; interleaved, the median and the
fastest, and their ratios; and the map alone. ``resident``: bytes of the map that are in memory for each row
of the capacity, when no ids have rows, a tenth of them, half, and all. ``growing``: milliseconds to plan
batches of new ids until the table is full, and on, so that each new id takes another's row: the median and
the longest. ``bytes_a_row``: of the full map. All on one thread, in the processor's time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from mmap import PAGESIZE
from pathlib import Path
from statistics import median
from time import thread_time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.data.columns import Columns
from recpipe.data.id_mapper import IdMapper
from recpipe.data.schema import Schema
from recpipe.plugin.tables import Growth, SparseFeature, Table, TableOptimizer, TableSet
from recpipe.tables.dynamic.id_map import IdMap
from recpipe.tables.resident import ResidentCollection


def milliseconds(work: Callable[[], object]) -> float:
    """The processor's time that ``work`` takes in this thread: other programs' does not count."""
    started = thread_time()
    work()
    return 1000 * (thread_time() - started)


class Lookups:
    """One table of all features, and batches of keys that are all known to the map."""

    def __init__(self, rows: int, dim: int, features: int, batch: int) -> None:
        names = tuple(f"f{number}" for number in range(features))
        tables = TableSet((Table("t", rows, names),), dim, TableOptimizer("sgd", 0.1), 1)
        self.collection = ResidentCollection(tables, torch.device("cpu"), padded=False)
        self.names, self.batch, self.known = list(names), batch, rows - 2
        schema = Schema((), tuple(SparseFeature(name, rows) for name in names))
        self.hashed = IdMapper(schema, (), ("hashed",) * features)
        self.map = IdMap(Growth("t"), rows, 1)
        self.rng = np.random.default_rng(1)
        for keys in np.array_split(self.rng.permutation(self.known), 1 + self.known // 100_000):
            self.map.plan(spread(keys))

    def keys(self) -> NDArray[np.int64]:
        """A batch's keys, int64 [B, F]: few of them often."""
        size = self.batch * len(self.names)
        ranks = (self.known ** self.rng.random(size)).astype(np.int64) - 1
        return spread(ranks).reshape(self.batch, -1)

    def fixed(self, keys: NDArray[np.int64]) -> torch.Tensor:
        """Pooled rows of hashed keys."""
        empty = np.empty(0, np.float32)
        return self._pooled(self.hashed(Columns(empty, empty, keys.view(np.uint64))).ids.T)

    def grown(self, keys: NDArray[np.int64]) -> torch.Tensor:
        """Pooled rows of the rows that keys have got."""
        return self._pooled(self.plan(keys))

    def plan(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows that keys have got, by feature."""
        return self.map.plan(np.ascontiguousarray(keys.T).reshape(-1))[0]

    def _pooled(self, rows: NDArray[np.integer]) -> torch.Tensor:
        values = torch.from_numpy(np.ascontiguousarray(rows, np.int64).reshape(-1))
        lengths = torch.ones(len(values), dtype=torch.int64)
        return self.collection.lookup(KeyedJaggedTensor(self.names, values, lengths=lengths))


def spread(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Keys far apart, as hashes of text are; an odd factor keeps them distinct."""
    return (keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)


def resident(rows: int, batch: int) -> dict[str, float]:
    """Bytes in memory for each row of the capacity, by the share of rows that ids have."""
    before, own = in_memory(), IdMap(Growth("t"), rows, 1)
    found, planned = {"0": (in_memory() - before) / rows}, 0
    for share in (0.1, 0.5, 1.0):
        while planned < int(share * (rows - 2)):
            own.plan(spread(np.arange(planned, planned + batch)))
            planned += batch
        found[f"{share:g}"] = (in_memory() - before) / rows
    return found


def in_memory() -> int:
    """Bytes of this process that are in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGESIZE


def growing(rows: int, batch: int, evict: str) -> dict[str, float]:
    """Plan batches of new ids until twice the table's rows have come."""
    own, times = IdMap(Growth("t", evict=evict), rows, 1), []
    for low in range(0, 2 * rows, batch):
        keys = spread(np.arange(low, low + batch))
        times.append(milliseconds(lambda keys=keys: own.plan(keys)))
    return {
        "median_ms": median(times),
        "longest_ms": max(times[1:]),
        "evicted": own.content.figures.evicted,
        "bytes_a_row": own.nbytes / rows,
    }


def measured(rows: int, dim: int, features: int, batch: int, batches: int) -> dict[str, Any]:
    """All figures."""
    torch.set_num_threads(1)
    lookups = Lookups(rows, dim, features, batch)
    times: dict[str, list[float]] = {"fixed": [], "grown": [], "plan": []}
    with torch.no_grad():
        for number in range(batches + 3):
            keys = lookups.keys()
            for name, way in (("fixed", lookups.fixed), ("grown", lookups.grown), ("plan", lookups.plan)):
                own = lookups.keys() if name == "plan" else keys  # not those that are in the caches
                spent = milliseconds(lambda way=way, own=own: way(own))
                if number >= 3:
                    times[name].append(spent)
    lookup = {}
    for name, of in (("median", median), ("fastest", min)):
        fixed, grown = of(times["fixed"]), of(times["grown"])
        plan = of(times["plan"])
        lookup[name] = {"fixed_ms": fixed, "grown_ms": grown, "ratio": grown / fixed, "plan_ms": plan}
    del lookups
    return {
        "resident": resident(rows, batch),
        "lookup": lookup,
        "growing": {evict: growing(rows, batch, evict) for evict in ("lru", "lfu")},
    }


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, usual in (("rows", 2_000_000), ("dim", 16), ("features", 8), ("batch", 8192), ("batches", 40)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    print(json.dumps(measured(**vars(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
