"""Sharded tables in processes of their own, trained beside tables that are whole."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.checkpoint.table_files import check_tables, rows_of_tables
from recpipe.distributed.ranks import Ranks, join_group
from recpipe.plugin.api import Contribution, Plugin
from recpipe.plugin.assembly import Assembly, assemble
from recpipe.plugin.calls import Origin
from recpipe.plugin.collection import TableCollection
from recpipe.plugin.context import TableInfo
from recpipe.plugin.first_values import Normal
from recpipe.plugin.planner import Planner
from recpipe.plugin.tables import SparseFeature, TableOptimizer, TableSet
from recpipe.tables.groups import ModelTables
from recpipe.tables.resident import ResidentCollection
from recpipe.tables.sharding.claims import ShardClaims
from recpipe.tables.sharding.collection import ShardedCollection
from recpipe.tables.sharding.plan import ShardPlan
from recpipe.tables.sharding.planning import Sharding
from recpipe.tables.sharding.tables import shard_tables
from tests.ranks import end_process, joined
from tests.tables.samples import CPU

ROWS = {"a": 40, "b": 601, "keys": 3, "d.x": 90}
"""No module may be called ``keys`` or ``d.x``."""
FEATURES = tuple(SparseFeature(name, rows) for name, rows in ROWS.items())
DIM = 256
"""Wide enough for column-wise sharding over two hosts, at 128 columns a part."""
SIZE = 31
"""Samples of a batch: no number of ranks shares them evenly."""


@dataclass(frozen=True)
class Case:
    optimizer: str
    types: Mapping[str, str]
    hosts: int = 1

    @property
    def name(self) -> str:
        return f"{self.optimizer} {' '.join(self.types.values())} hosts={self.hosts}"


class Placed(Planner):
    def __init__(self, types: Mapping[str, str]) -> None:
        self.types = types

    def constrain(self, table: TableInfo) -> ParameterConstraints:
        return ParameterConstraints(
            sharding_types=[self.types.get(table.name, self.types["*"])], min_partition=128
        )


class Places(Plugin):
    def __init__(self, types: Mapping[str, str]) -> None:
        self.types = types

    def contribute(self, ctx) -> Contribution:
        return Contribution(planner=Placed(self.types))


def assembly(types: Mapping[str, str]) -> Assembly:
    plugin = Places(types)
    info = {f.name: TableInfo(f.name, f.rows, DIM) for f in FEATURES}
    return assemble([(Origin("places"), plugin, plugin.contribute(None))], info, prefer={})


def claims_of(types: Mapping[str, str]) -> ShardClaims:
    """Of a plugin that shards tables so."""
    return ShardClaims.of(assembly(types))


def table_set(optimizer: str) -> TableSet:
    # The usual 1e-8 would make a step out of the rounding error of a gradient that is almost zero.
    made = TableSet.one_each(FEATURES, DIM, TableOptimizer(optimizer, 0.1, 1e-3), seed=3)
    drawn = [replace(t, first=Normal(0.0, 0.05)) if t.name == "b" else t for t in made.tables]
    return replace(made, tables=tuple(drawn))


def batches(count: int) -> list[KeyedJaggedTensor]:
    """Bags of 0 to 3 skewed ids; the last batch has fewer samples than there are ranks."""
    rng = np.random.default_rng(5)
    made = []
    for size in [SIZE] * (count - 1) + [1]:
        lengths = rng.integers(0, 4, len(FEATURES) * size)
        ids = [
            (rng.random(int(lengths[i * size : (i + 1) * size].sum())) ** 3 * f.rows).astype(np.int64)
            for i, f in enumerate(FEATURES)
        ]
        names = [f.name for f in FEATURES]
        values = torch.from_numpy(np.concatenate(ids))
        made.append(KeyedJaggedTensor(names, values, lengths=torch.from_numpy(lengths)))
    return made


def part(sparse: KeyedJaggedTensor, low: int, high: int) -> KeyedJaggedTensor:
    """Samples [low, high)."""
    tables = [sparse[name].to_dense()[low:high] for name in sparse.keys()]  # noqa: SIM118
    lengths = torch.tensor([len(bag) for table in tables for bag in table], dtype=torch.int64)
    values = torch.cat([bag for table in tables for bag in table] or [torch.empty(0, dtype=torch.int64)])
    return KeyedJaggedTensor(sparse.keys(), values, lengths=lengths)


def train(tables: TableCollection, sparse: KeyedJaggedTensor, first: int, total: int) -> None:
    """One step of a loss whose gradient differs from sample to sample and column to column."""
    pooled = tables(sparse).to_dict()
    values = torch.cat([pooled[f.name] for f in FEATURES], dim=1)
    weight = torch.arange(first, first + len(values), dtype=torch.float32)[:, None]
    columns = torch.linspace(0.5, 1.5, values.shape[1])
    ((values + columns).square() * (1 + weight / total) * columns / total).sum().backward()
    tables.update()


def contents(tables: TableCollection) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    found: dict[str, list] = {}
    for region in tables.regions():
        found.setdefault(region.table, []).append(tables.read(region))
    return {n: tuple(np.concatenate(p) for p in zip(*parts, strict=True)) for n, parts in found.items()}  # type: ignore[misc]


def apart(one: np.ndarray, other: np.ndarray) -> float:
    """Largest difference; of values above 1, the states that add up squares, relative to them."""
    return float((np.abs(one - other) / np.maximum(1, np.abs(other))).max(initial=0))


def started(tables: ModelTables, saved: Path | None) -> ModelTables:
    """``tables`` with the rows in ``saved``, if there are some."""
    if saved is None:
        return tables
    shapes = tables.shapes()
    return tables.starting_with(rows_of_tables(check_tables(saved, shapes), shapes))


def planned(case: Case, ranks: Ranks) -> tuple[Sharding, ShardPlan]:
    sharding = Sharding(
        ModelTables.single(table_set(case.optimizer)),
        claims_of(case.types),
        CPU,
        ranks.world,
        -(-SIZE // ranks.world),
        split_rows=True,
        kernel="fused",
        cached_share=1.0,
    )
    return sharding, sharding.plan(join_group(CPU, ranks))


def build(case: Case, ranks: Ranks) -> ShardedCollection:
    (tables,) = shard_tables(*planned(case, ranks), ranks)
    return tables


def ranks_of(rank: int, world: int) -> Ranks:
    everyone = tuple(range(world))
    return Ranks(rank, world, everyone, everyone)


def process(rank: int, world: int, folder: str, cases: Sequence[Case], steps: int) -> None:
    """Train every case; rank 0 writes how far each is from whole tables, by part of the record."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    with joined(rank, world, str(Path(folder, "meet"))):
        ranks, told = ranks_of(rank, world), {}
        for case in cases:
            os.environ["LOCAL_WORLD_SIZE"] = str(world // case.hosts)
            tables = build(case, ranks)
            whole = ResidentCollection(table_set(case.optimizer), CPU)
            for sparse in batches(steps):
                mine = ranks.shares(0, sparse.stride())[rank]
                train(tables, part(sparse, mine.start, mine.stop), mine.start, sparse.stride())
                train(whole, sparse, 0, sparse.stride())
            ours, theirs = contents(tables), contents(whole)
            kinds = {n: t.sharding for n, t in tables.shards.items()}
            told[case.name] = {
                "kinds": kinds,
                "difference": {n: max(map(apart, v, theirs[n])) for n, v in ours.items()},
                "moved": max(
                    float(np.abs(ours[n][0] - table_set("sgd").fill(n, 0, len(ours[n][0]))[:, :DIM]).max())
                    for n in ours
                ),
                "sent": sum(c.bytes_sent for c in tables.collectives.values()),
            }
        if rank == 0:
            Path(folder, "told.json").write_text(json.dumps(told))
        dist.barrier()
    end_process()
