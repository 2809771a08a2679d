"""Tables and options of tests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from recpipe_neo import measure
from recpipe_neo.machine_profile import (
    CollectiveSample,
    ExchangeSample,
    LookupSample,
    Machine,
    MachineProfile,
)
from recpipe_neo.stats import FeatureStats, feature_stats
from torch import nn
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator, get_partition_by_type
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    Perf,
    Shard,
    ShardingOption,
    Storage,
    Topology,
)
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.plugin.batch import Batch
from recpipe.tables.sharding.planning import TableSharder


def option(name: str, kind: str, costs: list[float], sizes: list[int] | None = None) -> ShardingOption:
    """A table with one shard of 8 rows for each cost; ``sizes``: their bytes."""
    weight = torch.empty(8 * len(costs), 4, device="meta")
    shards = [
        Shard([8, 4], [8 * i, 0], Storage(0, size), Perf(cost, 0, 0, 0))
        for i, (cost, size) in enumerate(zip(costs, sizes or [1] * len(costs), strict=True))
    ]
    module = ("", nn.Module())
    return ShardingOption(
        name, weight, module, [1.0], 16, kind, get_partition_by_type(kind), "fused", shards, is_pooled=True
    )


def topology(world: int, bytes_per_rank: int = 2**34, local_world: int | None = None) -> Topology:
    """CPU ranks, ``local_world`` of them on each host."""
    return Topology(world, "cpu", ddr_cap=bytes_per_rank, local_world_size=local_world)


def collection(tables: dict[str, tuple[int, int]]) -> nn.Module:
    """A module that holds bags of (rows, columns) by name."""
    configs = [
        EmbeddingBagConfig(name=name, embedding_dim=dim, num_embeddings=rows, feature_names=[name])
        for name, (rows, dim) in tables.items()
    ]
    holder = nn.Module()
    holder.tables = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    return holder


def options(
    module: nn.Module, world: int, constraints: dict[str, ParameterConstraints]
) -> list[ShardingOption]:
    """All options of TorchRec's enumerator with its analytic costs, for 64 samples on each rank."""
    enumerator = EmbeddingEnumerator(topology(world), 64, constraints)
    found: list[ShardingOption] = enumerator.enumerate(module, [TableSharder()])
    return found


def made_up(machine: Machine, exchange: float = 1.0) -> MachineProfile:
    """Measurements of a machine that follows simple laws; ``exchange`` scales what exchanges cost."""
    lookups = []
    for tables, rows in ((4, 100), (1, 5_000), (4, 100_000), (1, 1_000_000)):
        for dim in (16, 64):
            for bags, pooling in ((512, 1), (2048, 10), (512, 50)):
                distinct = min(rows, 0.7 * bags * pooling)
                work = LookupSample(tables, rows, dim, bags, bags * pooling, distinct, 0, 0)
                lookups.append(replace(work, forward=forward_ms(work), backward=2 * forward_ms(work)))
    collectives = [
        CollectiveSample(name, size, 0.1 + exchange * 1e-6 * size, 0.05 + exchange * 5e-7 * size)
        for name in ("all_to_all", "reduce_scatter", "all_gather", "all_reduce")
        for size in (4096, 2**20, 2**24)
    ]
    exchanges = [
        _step(machine.world, kind, owns, *shape, exchange)
        for kind in ("table_wise", "column_wise", "row_wise", "table_row_wise", "data_parallel")
        for owns in (True, False)[: machine.world]
        for shape in ((1, 16, 64), (8, 16, 1024), (8, 64, 1024))
    ]
    return MachineProfile(machine, lookups, collectives, exchanges)


def _step(
    world: int, kind: str, owns: bool, tables: int, dim: int, samples: int, exchange: float
) -> ExchangeSample:
    """0.3 ms for each phase, its ids or floats, and lookups; replicated parameters count as floats too."""
    local, rows_cut = kind == "data_parallel", kind.endswith("row_wise")
    columns = 2 if kind == "column_wise" else 1
    bags = samples * (1 if local else world)
    received, sent = samples * dim, bags * dim if (owns or rows_cut) and not local else 0
    ids = samples * columns * (1 + (world if owns and not local else 0))
    time = 0.3 + exchange * 1e-6 * tables * (received + sent)
    looked = LookupSample(tables * columns, 1000, dim // columns, bags, bags if owns or local else 0, 1, 0, 0)
    forward = forward_ms(looked) if owns or local or rows_cut else 0.0
    return ExchangeSample(
        kind, owns, tables, 1000, dim, columns, samples, samples,
        0.3 + exchange * 1e-6 * tables * ids, time + forward,
        time + (exchange * 1e-6 * tables * 1000 * dim if local else 2 * forward),
    )  # fmt: skip


def forward_ms(work: LookupSample) -> float:
    """A call, bags, lookups and floats cost; no cache matters."""
    return 0.05 + 1e-6 * work.tables * (10 * work.bags + 5 * work.lookups + 0.2 * work.lookups * work.dim)


def measure_little(patch: pytest.MonkeyPatch) -> None:
    """Let the planner measure this machine in seconds instead of half a minute."""
    patch.setattr(measure, "PASSES", 1)
    patch.setattr(measure, "LOOKUP_TABLES", ((1, 1000), (4, 5000)))
    patch.setattr(measure, "LOOKUP_SHAPES", ((64, 1), (512, 5)))
    patch.setattr(measure, "COLLECTIVE_BYTES", (2**12, 2**18))
    patch.setattr(measure, "SHAPES", measure.SHAPES[:3])


def machine(world: int) -> Machine:
    """A made-up one."""
    return Machine(64, 1, world, world, "gloo", "exact_sgd")


def uniform_stats(rows: int, pooling: int, samples: int, seed: int = 0) -> FeatureStats:
    """Of two batches of ``samples`` samples with ids drawn evenly."""
    batches = []
    for index in range(2):
        ids = np.random.default_rng(seed + index).integers(0, rows, samples * pooling)
        batches.append(bags({"t": (ids, np.full(samples, pooling))}))
    return feature_stats(batches)["t"]


def bags(features: dict[str, tuple[np.ndarray, np.ndarray]]) -> Batch:
    """A batch of features, by name their ids and the samples' numbers of them."""
    ids, lengths = (torch.from_numpy(np.concatenate(part)) for part in zip(*features.values(), strict=True))
    size = len(lengths) // len(features)
    sparse = KeyedJaggedTensor(list(features), ids.long(), lengths=lengths.int())
    return Batch(torch.zeros(size, 1), sparse, torch.zeros(size))
