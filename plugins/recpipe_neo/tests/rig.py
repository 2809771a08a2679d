"""Tables and options of tests."""

from __future__ import annotations

import torch
from recpipe_neo.split import NeoSharder
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
    found: list[ShardingOption] = enumerator.enumerate(module, [NeoSharder()])
    return found
