"""Ids that grow beside ids that are hashed into a fixed table: a batch's lookup, memory, and pauses.

    python benchmarks/growing.py [--rows 2000000] [--dim 16] [--features 8] [--batch 8192] [--batches 40]
                                 [--dims 32 64 128]

``lookup``: milliseconds of a batch from its keys to its pooled rows, all ids known: hashed and looked up in a
fixed table (``fixed``), read as rows that were prepared beside the keys and looked up there (``prepared``),
planned by the map and looked up in a table that grows (``grown``), and the same of an evaluation, which notes
nothing (``known``); in turns of changing order, the median and the fastest, and the ratios to ``fixed``; and
the map alone.
``trained``: the same with the update of the rows. Ids have got their rows in no order; in ``of_a_stream`` in
that in which a stream of such batches would have brought them, so that frequent ones are neighbours.
``torchrec``: the map alone beside TorchRec's, ``MCHManagedCollisionModule`` with LRU: milliseconds of a batch
in evaluation and in training, there also of one in which it evicts (every ``INTERVAL``), bytes a row, and ids
that share a row. (TorchRec's MPZCH has only a lookup on a CPU, and no way to fill it.) ``resident``:
bytes of the map that are in memory for each row of the capacity, when no ids have rows, a tenth of them,
half, and all; ``resident_rows``: the same of the table itself, trained by Adagrad. ``growing``: milliseconds
to plan batches of new ids until the table is full, and on, so that each new id takes another's row: the
median and the longest. ``bytes_a_row``: of the full map. All on one thread, in the processor's time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from mmap import PAGESIZE
from pathlib import Path
from statistics import median
from time import thread_time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.modules.mc_modules import LRU_EvictionPolicy, MCHManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor

from recpipe.common.loops import load_loops
from recpipe.data.columns import BatchMaker, Columns
from recpipe.data.id_mapper import IdMapper
from recpipe.data.schema import IdRule, Schema
from recpipe.data.sources.transforms import hash_rows
from recpipe.plugin.batch import Batch
from recpipe.plugin.tables import Growth, SparseFeature, Table, TableOptimizer, TableSet
from recpipe.tables.dynamic.growing import GrowingTables
from recpipe.tables.dynamic.id_map import IdMap
from recpipe.tables.groups import ModelTables
from recpipe.tables.resident import ResidentCollection

INTERVAL = 20
"""Batches from one eviction of TorchRec's to the next."""
AT_ONCE = 100_000
"""Ids that get their rows in one batch, before anything is measured."""


def milliseconds(work: Callable[[], object]) -> float:
    """The processor's time that ``work`` takes in this thread: other programs' does not count."""
    started = thread_time()
    work()
    return 1000 * (thread_time() - started)


class Lookups:
    """One table of all features, and batches of keys that are all known to its map. ``of_a_stream``: they
    have got their rows in the order in which such batches would have brought them."""

    def __init__(self, rows: int, dim: int, features: int, batch: int, of_a_stream: bool) -> None:
        self.names = [f"f{number}" for number in range(features)]
        tables = TableSet((Table("t", rows, tuple(self.names)),), dim, TableOptimizer("sgd", 0.1), 1)
        self.collection = ResidentCollection(tables, torch.device("cpu"), padded=False)
        growing = {name: Growth("t") for name in self.names}
        self.growing = GrowingTables(growing, ModelTables.single(tables), [self.collection], 1)
        self.batch, self.known = batch, rows - 2
        self.makers = {}
        for rule, growth in (("hashed", None), ("unchanged", None), ("keys", Growth("t"))):
            schema = Schema((), tuple(SparseFeature(name, rows, growth) for name in self.names))
            own: IdRule = "unchanged" if rule == "unchanged" else "hashed"
            self.makers[rule] = IdMapper(schema, (), (own,) * features), BatchMaker(schema, ())
        self.rng = np.random.default_rng(1)
        order = self.rng.permutation(self.known)
        if of_a_stream:  # each id's first time, where it comes in proportion to 1 / (its rank + 1)
            order = np.argsort(self.rng.exponential(size=self.known) * (np.arange(self.known) + 1))
        for keys in np.array_split(order, 1 + self.known // AT_ONCE):
            self.growing.maps["t"].plan(spread(keys))

    def keys(self) -> NDArray[np.int64]:
        """A batch's keys, int64 [B, F]: few of them often."""
        return frequent(self.rng, self.known, self.batch * len(self.names)).reshape(self.batch, -1)

    def fixed(self, keys: NDArray[np.int64]) -> torch.Tensor:
        """Pooled rows of hashed keys."""
        return self.collection.lookup(self._batch(keys, "hashed").sparse)

    def prepared(self, rows: NDArray[np.int32]) -> torch.Tensor:
        """Pooled rows of ``rows`` [B, F]."""
        return self.collection.lookup(self._batch(rows, "unchanged").sparse)

    def known_rows(self, keys: NDArray[np.int64]) -> torch.Tensor:
        """Pooled rows of the rows that keys have, of which nothing is noted."""
        return self.collection.lookup(self.growing.rows_of(self._batch(keys, "keys")).sparse)

    def grown(self, keys: NDArray[np.int64]) -> torch.Tensor:
        """Pooled rows of the rows that keys have got."""
        return self.collection.lookup(self.planned(keys).sparse)

    def planned(self, keys: NDArray[np.int64]) -> Batch:
        """A batch with the rows that keys have got."""
        batch: Batch
        batch, plan = self.growing.plan(self._batch(keys, "keys"))
        self.growing.begin(plan)
        return batch

    def _batch(self, ids: NDArray[np.integer], rule: str) -> Batch:
        mapped, made = self.makers[rule]
        none = np.empty((len(ids), 0), np.float32)
        return made(mapped(Columns(none[:, :0], none, ids.view(np.uint64) if rule != "unchanged" else ids)))


def frequent(rng: np.random.Generator, known: int, size: int) -> NDArray[np.int64]:
    """``size`` keys of the ids of ``known`` ranks: each comes in proportion to 1 / (its rank + 1)."""
    return spread((known ** rng.random(size)).astype(np.int64) - 1)


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


def resident_rows(rows: int, dim: int, batch: int) -> dict[str, float]:
    """Bytes of a table's rows that are in memory, for each row, by the share of rows that ids have."""
    table = Table("t", rows, ("f",))
    growing = ModelTables.single(TableSet((table,), dim, TableOptimizer("adagrad", 0.1), 1)).growing("f")
    tables, before = growing.groups[0].tables, in_memory()
    collection = ResidentCollection(tables, torch.device("cpu"), padded=False)
    found, begun = {"0": (in_memory() - before) / rows}, 0
    for share in (0.1, 0.5, 1.0):
        for low in range(begun, int(share * rows), batch):
            own = np.arange(low, min(low + batch, rows))
            collection.renew(own, torch.ones(len(own), tables.layout.width))
        begun = int(share * rows)
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


def lookups(
    rows: int, dim: int, features: int, batch: int, batches: int, of_a_stream: bool = False
) -> dict[str, Any]:
    """``lookup`` and ``trained``."""
    own = Lookups(rows, dim, features, batch, of_a_stream)
    gradient = torch.zeros(batch, features * dim)
    ways: dict[str, Callable[[NDArray[Any]], object]] = {
        "lookup_fixed": own.fixed,
        "lookup_prepared": own.prepared,
        "lookup_grown": own.grown,
        "lookup_known": own.known_rows,
        "trained_fixed": lambda keys: own.fixed(keys).backward(gradient),  # type: ignore[no-untyped-call]
        "trained_prepared": lambda ids: own.prepared(ids).backward(gradient),  # type: ignore[no-untyped-call]
        "trained_grown": lambda keys: own.grown(keys).backward(gradient),  # type: ignore[no-untyped-call]
        "plan": own.planned,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(batches + 3):
        for name, way in own.rng.permutation(
            np.array(list(ways.items()), object)
        ):  # none always after another
            keys: NDArray[Any] = own.keys()  # anew for each way, so that it finds no other's in the caches
            if name.endswith("prepared"):
                keys = hash_rows(keys.view(np.uint64), rows).astype(np.int32)
            with torch.set_grad_enabled(name.startswith("trained")):
                spent = milliseconds(lambda way=way, keys=keys: way(keys))
            if number >= 3:
                times[name].append(spent)
    found: dict[str, Any] = {}
    for kind in ("lookup", "trained"):
        for name, of in (("median", median), ("fastest", min)):
            told = {f"{way}_ms": of(times[f"{kind}_{way}"]) for way in ("fixed", "prepared", "grown")}
            told |= {"ratio": told["grown_ms"] / told["fixed_ms"], "plan_ms": of(times["plan"])}
            if kind == "lookup":
                known = of(times["lookup_known"])
                told |= {"known_ms": known, "known_ratio": known / told["fixed_ms"]}
            found.setdefault(kind, {})[name] = told
    return found


def beside_torchrec(rows: int, features: int, batch: int, batches: int) -> dict[str, dict[str, float]]:
    """The map alone, and TorchRec's, with the same ids and batches: ``torchrec``."""
    rng, known = np.random.default_rng(1), rows - 2
    own, theirs = IdMap(Growth("t"), rows, 1), torchrec_map(rows, 1)
    ids = spread(rng.permutation(known))
    for keys in np.array_split(ids, 1 + known // AT_ONCE):
        own.plan(keys)
        theirs(jagged(keys))
    filled, theirs = theirs, torchrec_map(rows, INTERVAL)
    theirs.load_state_dict(filled.state_dict())
    ways: dict[str, Callable[[NDArray[np.int64]], object]] = {
        "recpipe_known": own.rows_of,
        "recpipe_trained": own.plan,
        "torchrec_known": lambda keys: theirs.eval()(jagged(keys)),
        "torchrec_trained": lambda keys: theirs.train()(jagged(keys)),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(max(batches, INTERVAL) + 3):
        for name, way in ways.items():
            keys = frequent(rng, known, batch * features)
            times[name].append(milliseconds(lambda way=way, keys=keys: way(keys)))
    shared = {"recpipe": own.rows_of(ids), "torchrec": theirs.eval()(jagged(ids))["t"].values().numpy()}
    size = {"recpipe": own.nbytes, "torchrec": sum(buffer.nbytes for buffer in theirs.buffers())}
    return {
        name: {
            "known_ms": median(times[f"{name}_known"][3:]),
            "trained_ms": median(times[f"{name}_trained"][3:]),
            "longest_ms": max(times[f"{name}_trained"][3:]),
            "bytes_a_row": size[name] / rows,
            "ids_that_share_a_row": known - len(np.unique(shared[name])),
        }
        for name in shared
    }


def torchrec_map(rows: int, interval: int) -> MCHManagedCollisionModule:
    """TorchRec's map of ids to ``rows`` rows, the last of which is that of unknown ones."""
    return MCHManagedCollisionModule(rows, torch.device("cpu"), LRU_EvictionPolicy(), interval)


def jagged(keys: NDArray[np.int64]) -> dict[str, JaggedTensor]:
    """One key a sample."""
    return {"t": JaggedTensor(torch.from_numpy(keys), lengths=torch.ones(len(keys), dtype=torch.int64))}


def in_both_orders(rows: int, dim: int, features: int, batch: int, batches: int) -> dict[str, Any]:
    """``lookup``, ``trained`` and ``of_a_stream``."""
    sizes = rows, dim, features, batch, batches
    return {**lookups(*sizes), "of_a_stream": lookups(*sizes, of_a_stream=True)}


def measured(
    rows: int, dim: int, features: int, batch: int, batches: int, dims: Sequence[int]
) -> dict[str, Any]:
    """All figures."""
    torch.set_num_threads(1)
    load_loops()
    return {
        "resident": resident(rows, batch),
        "resident_rows": resident_rows(rows, dim, batch),
        **in_both_orders(rows, dim, features, batch, batches),
        "by_dim": {own: in_both_orders(rows, own, features, batch, batches) for own in dims},
        "torchrec": beside_torchrec(rows, features, batch, batches),
        "growing": {evict: growing(rows, batch, evict) for evict in ("lru", "lfu")},
    }


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, usual in (("rows", 2_000_000), ("dim", 16), ("features", 8), ("batch", 8192), ("batches", 40)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--dims", type=int, nargs="*", default=[32, 64, 128])
    print(json.dumps(measured(**vars(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
