"""Tables placed by TorchRec's planner and run by ``DistributedModelParallel``.

The planner, sharders and codecs are plugins' extension points. One process in this version: the
placement, kernels and module are TorchRec's own, and all shards are on this process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import QuantizedCommCodecs, ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from recpipe.embedding import seams
from recpipe.embedding.collection import TableCollection
from recpipe.embedding.tables import FILL_ROWS, Region, TableSet, Values, to_numpy
from recpipe.plugin.api import TableInfo
from recpipe.plugin.assembly import Assembly


class _Holder(nn.Module):
    """``DistributedModelParallel`` replaces children, so the collection must be one."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables


class ShardedCollection(TableCollection):
    """TorchRec's ``ShardedEmbeddingBagCollection`` with fused optimizers, placed by a planner."""

    def __init__(self, tables: TableSet, assembly: Assembly, device: torch.device, batch_size: int) -> None:
        super().__init__()
        join_group(device)
        self.tables = tables
        holder = _Holder(EmbeddingBagCollection(tables=tables.configs(), device=torch.device("meta")))
        sharders = _sharders(tables, assembly)
        topology = Topology(world_size=1, local_world_size=1, compute_device=device.type)
        constraints = _constraints(tables, assembly)
        if assembly.planner is not None:
            planner = assembly.planner.part(topology, constraints)
        else:
            planner = EmbeddingShardingPlanner(
                topology=topology, constraints=constraints, batch_size=batch_size
            )
        group = dist.group.WORLD
        assert group is not None
        self.parallel = DistributedModelParallel(
            holder,
            env=ShardingEnv.from_process_group(group),
            device=device,
            plan=planner.collective_plan(holder, sharders, group),
            sharders=sharders,
        )
        self._shards = {f.name: seams.local_shards(self.parallel, f.name) for f in tables.features}
        for region in self.regions():
            records = tables.fill(region.table, region.start, region.stop)
            self.write(region, (records[:, region.left : region.right], records[:, tables.dim :]))

    def forward(self, sparse: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled rows by feature name."""
        pooled: KeyedTensor = self.parallel.module.tables(sparse).wait()
        return pooled

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """As TorchRec's collection."""
        return self.tables.configs()

    def regions(self) -> Iterator[Region]:
        """Every local shard, in chunks of rows."""
        for name, shards in self._shards.items():
            for shard in shards:
                rows, columns = shard.weights.shape
                for start in range(shard.row, shard.row + rows, FILL_ROWS):
                    stop = min(start + FILL_ROWS, shard.row + rows)
                    yield Region(name, start, stop, shard.column, shard.column + columns)

    def _local(self, region: Region) -> tuple[torch.Tensor, torch.Tensor]:
        shard = next(
            s
            for s in self._shards[region.table]
            if s.column == region.left and s.row <= region.start < s.row + len(s.weights)
        )
        rows = slice(region.start - shard.row, region.stop - shard.row)
        return shard.weights[rows], shard.state[rows]

    def read(self, region: Region) -> Values:
        """Current weights and optimizer state of ``region``."""
        weights, state = self._local(region)
        return to_numpy(weights), to_numpy(state)

    def write(self, region: Region, values: Values) -> None:
        """Replace the weights and optimizer state of ``region``."""
        with torch.no_grad():
            for local, value in zip(self._local(region), values, strict=True):
                local.copy_(torch.from_numpy(value))


def join_group(device: torch.device) -> None:
    """A process group of this process alone, which TorchRec's distributed modules ask for."""
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)


def _sharders(tables: TableSet, assembly: Assembly) -> list[Any]:
    """TorchRec's sharder with the fused optimizer and the plugins' codecs, or the plugins' own."""
    if assembly.sharders:
        return [owned.part for owned in assembly.sharders.values()]
    optimizer = tables.optimizer
    fused = {"optimizer": optimizer.kind, "learning_rate": optimizer.lr, "eps": optimizer.eps}
    return [EmbeddingBagCollectionSharder(fused_params=fused, qcomm_codecs_registry=_codecs(assembly))]


def _codecs(assembly: Assembly) -> dict[str, QuantizedCommCodecs]:
    """TorchRec's registry: by the collective's name, one codec for each direction."""
    registry: dict[str, QuantizedCommCodecs] = {}
    for (collective, direction), owned in assembly.codecs.items():
        setattr(registry.setdefault(collective.name, QuantizedCommCodecs()), direction, owned.part)
    return registry


def _constraints(tables: TableSet, assembly: Assembly) -> dict[str, ParameterConstraints]:
    """The plugins' limits; tables without one keep their fused optimizer, so no dense kernel."""
    constraints = {f.name: ParameterConstraints(compute_kernels=["fused"]) for f in tables.features}
    rows = {f.name: f.rows for f in tables.features}
    for aspect in ("placement", "kernel"):
        for policy, names in assembly.policies(aspect):
            for name in names:
                limit = policy.part.constrain(name, TableInfo(name, rows[name], tables.dim))
                if limit is not None:
                    constraints[name] = limit
    return constraints
