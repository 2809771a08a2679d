"""A sharding plan in plain values, which can be printed, saved as JSON, loaded, and converted to TorchRec's
type; and the modules that ``DistributedModelParallel`` shards by it in place.

TorchRec shards collections of one dimension, so that each collection of the model is replaced by a module
with one collection for each of its groups.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.sharding_plan import calculate_shard_sizes_and_offsets, placement
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
)
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from recpipe import private_api
from recpipe.common.saved import Damaged, entries, read_json, typed_as
from recpipe.common.tensors import tiles
from recpipe.errors import UserError
from recpipe.plugin.tables import TableOptimizer
from recpipe.private_api import OWN_KERNEL, EnumerableShardingSpec, ShardMetadata, module_name
from recpipe.tables.groups import ModelTables

SCHEMA = 1
_SHARDINGS = {kind.value for kind in ShardingType}
_DENSE = EmbeddingComputeKernel.DENSE.value
_KERNELS = (
    _DENSE,
    EmbeddingComputeKernel.FUSED.value,
    EmbeddingComputeKernel.FUSED_UVM.value,
    EmbeddingComputeKernel.FUSED_UVM_CACHING.value,
)
"""TorchRec's sharding types whose tables recpipe can read and write."""
_FROM_LIMITS = ("cache_params", "enforce_hbm", "stochastic_rounding", "bounds_check_mode", "output_dtype")
_LARGEST = 2**60
"""Most values of a table: more than any machine has, but within the range of TorchRec's arithmetic."""


@dataclass(frozen=True)
class Shard:
    """Rows [row, row + rows) and columns [column, column + columns) of a table on one rank."""

    rank: int
    row: int
    column: int
    rows: int
    columns: int
    predicted_ms: float | None = None
    """The milliseconds that the planner predicts for it in a step, communication included; None: not
    known."""


@dataclass(frozen=True)
class TablePlan:
    """The plan of one table, with TorchRec's names of ``sharding`` and ``kernel``. A data-parallel table is
    on every rank."""

    sharding: str
    kernel: str
    rows: int
    dim: int
    ranks: tuple[int, ...]
    """The ranks that TorchRec's planner listed; which of a table's ranks these are depends on the sharding
    type."""
    shards: tuple[Shard, ...]

    @property
    def replicated(self) -> bool:
        """Whether every rank has the whole table."""
        return self.sharding == "data_parallel"


@dataclass(frozen=True)
class ShardPlan:
    """The place of every part of every table, over ``world`` ranks."""

    world: int
    tables: Mapping[str, TablePlan]

    def to_dict(self) -> dict[str, Any]:
        """The content of plan.json."""
        return {"schema": SCHEMA, **asdict(self)}

    def torchrec(
        self,
        device: torch.device,
        local_world: int,
        limits: Mapping[str, ParameterConstraints],
        tables: ModelTables,
        own: Collection[str] = (),
    ) -> ShardingPlan:
        """TorchRec's plan for a model with the groups of ``tables`` at their paths; this rank's
        is on ``device``. TorchRec makes no memory for shards of ``own`` tables, which recpipe looks up."""
        # Of several processes each has the GPU of its local rank, a single one perhaps another.
        places = [placement(device.type, rank, local_world) for rank in range(self.world)]
        if self.world == 1:
            places = [f"rank:0/{device}"]
        made = {}
        for path, group in zip(module_paths(tables), tables.groups, strict=True):
            module = {}
            for name in group.tables.layout.tables:
                table, limit, spec = self.tables[name], limits.get(name, ParameterConstraints()), None
                if not table.replicated:
                    spec = EnumerableShardingSpec(
                        [
                            ShardMetadata([s.row, s.column], [s.rows, s.columns], places[s.rank])
                            for s in table.shards
                        ]
                    )
                module[module_name(name)] = ParameterSharding(
                    sharding_type=table.sharding,
                    compute_kernel=OWN_KERNEL if name in own and not table.replicated else table.kernel,
                    ranks=list(table.ranks),
                    sharding_spec=spec,
                    **{field: getattr(limit, field) for field in _FROM_LIMITS},
                )
            made[path] = EmbeddingModuleShardingPlan(module)
        return ShardingPlan(made)


def from_torchrec(
    plan: ShardingPlan, tables: ModelTables, shard_ms: Mapping[str, Sequence[float]], world: int
) -> ShardPlan:
    """Convert TorchRec's ``plan`` of a model with the groups of ``tables``. ``shard_ms``: predicted
    milliseconds by module."""
    made = {}
    for path, group in zip(module_paths(tables), tables.groups, strict=True):
        module, dim = plan.plan[path], group.tables.dim
        for table in group.tables.tables:
            found = module[module_name(table.name)]
            expected = shard_ms.get(module_name(table.name), ())
            if found.sharding_spec is None:
                places = [(rank, 0, 0, table.rows, dim) for rank in range(world)]
            else:
                places = [
                    (s.placement.rank(), *s.shard_offsets, *s.shard_sizes) for s in found.sharding_spec.shards
                ]
            ms = expected if len(expected) == len(places) else [None] * len(places)
            shards = tuple(Shard(*place, cost) for place, cost in zip(places, ms, strict=True))
            made[table.name] = TablePlan(
                found.sharding_type, found.compute_kernel, table.rows, dim, tuple(found.ranks), shards
            )
    return ShardPlan(world, made)


def load_plan(path: Path) -> ShardPlan:
    """Load a plan.json; ``UserError`` if it cannot be read or its shards do not fit their sharding types."""
    try:
        content = read_json(path)
        schema = entries({"schema": int}, content)["schema"]
        if schema != SCHEMA:
            raise UserError(f"{path}: a plan of schema {schema}, not {SCHEMA}; plan anew")
        plan = typed_as(ShardPlan, {k: v for k, v in content.items() if k != "schema"})
        for name, table in plan.tables.items():
            _check(name, table, plan.world)
    except (OSError, ValueError) as fault:
        raise UserError(f"{path} is no sharding plan ({fault}); make one with task=plan") from fault
    return plan


def _check(name: str, table: TablePlan, world: int) -> None:
    """``Damaged`` unless the shards are those that TorchRec makes for the sharding type, on existing
    ranks."""
    known = (_DENSE,) if table.replicated else _KERNELS
    if table.sharding not in _SHARDINGS or table.kernel not in known:
        raise Damaged(
            f"table '{name}' is {table.sharding!r} with kernel {table.kernel!r}: there is no such table"
        )
    ranks = [s.rank for s in table.shards]
    strange = next((r for r in (*ranks, *table.ranks) if not 0 <= r < world), None)
    if strange is not None:
        raise Damaged(f"table '{name}' has a shard on rank {strange} of {world}")
    if table.replicated:
        return
    parts = [(s.row, s.column, s.rows, s.columns) for s in table.shards]
    counted = parts and min(p[3] for p in parts) > 0 and table.rows * table.dim < _LARGEST
    if not counted or not tiles(parts, table.rows, table.dim):
        raise Damaged(f"the shards of table '{name}' do not tile its {table.rows} x {table.dim} values")
    # By these cuts and ranks TorchRec computes a row's rank at run time.
    hosts = [s.rank for s in table.shards if s.column == 0]  # the ranks that share the table's rows
    sizes, offsets = calculate_shard_sizes_and_offsets(
        torch.empty(table.rows, table.dim, device="meta"),
        len(hosts),
        len(hosts),
        table.sharding,
        table.shards[0].columns,
    )
    found = ([[s.rows, s.columns] for s in table.shards], [[s.row, s.column] for s in table.shards])
    in_order = table.sharding != ShardingType.ROW_WISE.value or ranks == list(range(world))
    if found != (sizes, offsets) or not in_order or ranks != list(table.ranks):
        raise Damaged(f"table '{name}' is not cut, or its ranks not listed, as {table.sharding} needs it")


def fused(optimizer: TableOptimizer) -> dict[str, object]:
    """FBGEMM's arguments for an optimizer fused into the backward pass; in place of one that it does not
    have, and recpipe makes, SGD."""
    return {
        "optimizer": optimizer.kind if optimizer.fused else EmbOptimType.EXACT_SGD,
        "learning_rate": optimizer.lr,
        "eps": optimizer.eps,
        "stochastic_rounding": optimizer.stochastic_rounding,
    }


def module_paths(tables: ModelTables) -> list[str]:
    """The path of each group's module in a model, inside ``groups_in``."""
    return [f"{g.path}.{n}" if g.path else str(n) for n, g in enumerate(tables.groups)]


def skeleton(tables: ModelTables) -> nn.Module:
    """A model with only the groups' modules at their paths, which is all that a planner needs."""
    model = nn.Module()
    for path, holder in _holders(tables).items():
        if not path:
            return holder
        *above, name = path.split(".")
        parent = model
        for step in above:
            if step not in parent._modules:
                setattr(parent, step, nn.Module())
            parent = parent.get_submodule(step)
        setattr(parent, name, holder)
    return model


@contextmanager
def groups_in(model: nn.Module, tables: ModelTables) -> Iterator[None]:
    """In the block, the groups' modules replace the collections of ``model``; afterwards these are put
    back."""
    before: dict[str, nn.Module] = {}
    try:
        for path, holder in _holders(tables).items():
            before[path] = model.get_submodule(path)
            model.set_submodule(path, holder)
        yield
    finally:
        for path, collection in before.items():
            model.set_submodule(path, collection)


def _holders(tables: ModelTables) -> dict[str, nn.Module]:
    """A module for each collection, by path, that holds a collection for each of its groups: of its tables on
    the meta device, under their ``module_name``, each with its optimizer. Bags are summed; means are computed
    from the sums later."""
    found: dict[str, nn.Module] = {}
    for number, group in enumerate(tables.groups):
        own, nowhere = group.tables, torch.device("meta")
        configs = [replace(config, name=module_name(config.name)) for config in own.configs()]
        made: nn.Module
        if own.pooled:
            made = EmbeddingBagCollection(tables=configs, is_weighted=own.weighted, device=nowhere)
        else:
            named = ("name", "embedding_dim", "num_embeddings", "feature_names", "data_type")
            rows = [EmbeddingConfig(**{name: getattr(config, name) for name in named}) for config in configs]
            made = EmbeddingCollection(tables=rows, device=nowhere)
        for weight in made.parameters():
            private_api.fuse(weight, fused(own.optimizer))
        setattr(found.setdefault(group.path, nn.Module()), str(number), made)
    return found
