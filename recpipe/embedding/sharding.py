"""Which rank holds which part of which table: TorchRec's planner, with this machine's memory and the
recipe's limits, or a plan from a file.

TorchRec leaves row-wise sharding out on CPUs and offers column-wise sharding with every optimizer;
``TableSharder`` mends both.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.types import PlannerError, ShardingOption, Stats
from torchrec.distributed.types import ShardingPlanner, ShardingType
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from recpipe.embedding.shard_claims import codecs, plugin_sharder, refuse_limit, refuse_type, stored_types
from recpipe.embedding.shard_plan import ShardPlan, TablePlan, from_torchrec
from recpipe.embedding.tables import TableSet, module_name
from recpipe.errors import UserError
from recpipe.plugin.api import TableInfo
from recpipe.plugin.assembly import Assembly

COLUMN_SPLITTING = frozenset({"column_wise", "table_column_wise", "grid_shard"})
"""Sharding types that cut rows of a table apart."""
PLANNED = tuple(t.value for t in ShardingType if t is not ShardingType.GRID_SHARD)
"""What TorchRec's planner considers for a table of which nothing is said."""
MIN_COLUMNS = 128
"""TorchRec's own limit of a column-wise part's width; a grid with fewer parts than hosts makes it fail."""
NO_OPTION = "No available sharding type and compute kernel"
"""How TorchRec's RuntimeError begins where a table's limits leave its planner nothing to choose."""
KERNELS = {
    "fused": EmbeddingComputeKernel.FUSED.value,
    "uvm": EmbeddingComputeKernel.FUSED_UVM.value,
    "uvm_caching": EmbeddingComputeKernel.FUSED_UVM_CACHING.value,
}
"""``tiers.kernel``: rows in device memory, in host memory that a GPU reads directly, or there behind a
cache in device memory."""


class _Holder(nn.Module):
    """``DistributedModelParallel`` replaces children, so the collection must be one."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables


class TableSharder(EmbeddingBagCollectionSharder):  # type: ignore[misc]
    """TorchRec's sharder with the types that work: row-wise on CPUs too, no column-wise one where it would
    change the optimizer (row-wise Adagrad keeps one state for a whole row), and a grid only where there are
    columns for every host."""

    def __init__(self, split_rows: bool, grid: bool = True, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.split_rows, self.grid = split_rows, grid

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Every type that TorchRec runs on the device and the optimizer allows."""
        types = [t.value for t in ShardingType if self.grid or t is not ShardingType.GRID_SHARD]
        return [t for t in types if self.split_rows or t not in COLUMN_SPLITTING]


@dataclass
class Prediction(Stats):  # type: ignore[misc]
    """What a planner expects of its plan; empty until it has planned."""

    shard_ms: dict[str, list[float]]
    """Milliseconds of each shard, by the table's ``module_name``."""

    def log(self, *, best_plan: list[ShardingOption], **_: Any) -> None:
        """Called by TorchRec's planner with the plan that it chose."""
        for option in best_plan:
            self.shard_ms[option.name] = [float(s.perf.total) if s.perf else 0.0 for s in option.shards]


@dataclass(frozen=True)
class Sharding:
    """Everything that planning and building need to agree on."""

    tables: TableSet
    assembly: Assembly
    device: torch.device
    world: int
    rank_batch: int
    """Samples of one rank's share of a batch, padding included."""
    split_rows: bool
    kernel: str
    cached_share: float
    """Share of a table's rows that ``kernel=uvm_caching`` keeps in device memory."""

    def data_types(self) -> dict[str, DataType]:
        """The tables that a plugin stores in a type of its choice."""
        found = {}
        for table, (owner, kind) in stored_types(self.assembly).items():
            refuse_type(table, owner, kind, self.device)
            found[table] = kind
        return found

    def module(self) -> nn.Module:
        """The tables without memory under their ``module_name``, as a child named ``tables``."""
        made = self.tables.configs(self.data_types())
        configs = [replace(config, name=module_name(config.name)) for config in made]
        return _Holder(EmbeddingBagCollection(tables=configs, device=torch.device("meta")))

    def sharders(self) -> list[Any]:
        """A sharder with the fused optimizer and the plugins' codecs: a plugin's, or else recpipe's."""
        optimizer = self.tables.optimizer
        fused: dict[str, Any] = {
            "optimizer": optimizer.kind,
            "learning_rate": optimizer.lr,
            "eps": optimizer.eps,
        }
        if self.kernel == "uvm_caching":
            fused |= {"cache_load_factor": self.cached_share, "prefetch_pipeline": True}
        registry = codecs(self.assembly)
        brought = self.assembly.sharders.items()
        return [plugin_sharder(kind, owned, fused, registry) for kind, owned in brought] or [
            TableSharder(self._may_split, self._grid, fused_params=fused, qcomm_codecs_registry=registry)
        ]

    def topology(self) -> Topology:
        """The ranks as TorchRec's planner sees them, with this machine's memory shared among its ranks."""
        local = min(int(os.environ.get("LOCAL_WORLD_SIZE", self.world)), self.world)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local
        hbm = torch.cuda.get_device_properties(self.device).total_memory if self._on_gpu else None
        return Topology(
            world_size=self.world,
            local_world_size=local,
            compute_device=self.device.type,
            hbm_cap=hbm,
            ddr_cap=memory,
        )

    @property
    def _on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def constraints(self) -> dict[str, ParameterConstraints]:
        """Limits by table: the recipe's kernel, then what plugins say; fields left alone keep their value."""
        kernels = [KERNELS[self.kernel], EmbeddingComputeKernel.DENSE.value]
        limits = {t.name: ParameterConstraints(compute_kernels=kernels) for t in self.tables.tables}
        rows = {t.name: t.rows for t in self.tables.tables}
        for aspect in ("placement", "kernel"):
            for policy, names in self.assembly.policies(aspect):
                for name in names:
                    limit = policy.part.constrain(name, TableInfo(name, rows[name], self.tables.dim))
                    if limit is not None:
                        refuse_limit(name, policy, limit, self.device)
                        limits[name] = _merged(limits[name], limit)
        for limit in limits.values():
            if limit.sharding_types is None and self.assembly.sharders and not self._may_split:
                # A plugin's sharder offers what TableSharder does not.
                limit.sharding_types = [t for t in PLANNED if t not in COLUMN_SPLITTING]
        for name, kind in self.data_types().items():
            if kind is not DataType.FP32:
                limits[name].sharding_types = _fused_types(name, limits[name].sharding_types)
        return limits

    def plan(self, group: dist.ProcessGroup | None) -> ShardPlan:
        """What the planner decides: together with the other ranks of ``group``, or alone (None)."""
        topology, limits = self.topology(), self.constraints()
        for name, limit in limits.items():
            wanted = limit.sharding_types
            if wanted and not self._may_split and COLUMN_SPLITTING.issuperset(wanted):
                raise _splits_rows(name, wanted[0])
            if wanted == [ShardingType.GRID_SHARD.value] and not self._grid:
                raise UserError(
                    f"table '{name}': grid_shard needs {limit.min_partition or MIN_COLUMNS} columns for each "
                    f"host, and tables have {self.tables.dim}: use table_row_wise, or raise "
                    "model.embedding_dim"
                )
        by_module = {module_name(name): limit for name, limit in limits.items()}
        seen = Prediction({})
        planner: ShardingPlanner
        if self.assembly.planner is not None:
            planner = self.assembly.planner.part(topology, by_module)
            told = getattr(planner, "prediction", None)
            seen = told if isinstance(told, Prediction) else seen
        else:
            planner = EmbeddingShardingPlanner(
                topology=topology, constraints=by_module, batch_size=self.rank_batch, stats=[seen]
            )
        module, sharders = self.module(), self.sharders()
        try:
            if group is None:
                made = planner.plan(module, sharders)
            else:
                made = planner.collective_plan(module, sharders, group)
        except (PlannerError, RuntimeError) as fault:
            if not isinstance(fault, PlannerError) and NO_OPTION not in str(fault):
                raise
            raise UserError(f"the planner found no way to place the tables: {_reason(fault)}") from fault
        plan = from_torchrec(made, self.tables, seen.shard_ms, self.world)
        self.check(plan, limits)
        return plan

    @property
    def _grid(self) -> bool:
        topology = self.topology()
        hosts = topology.world_size // topology.local_world_size
        part = min(limit.min_partition or MIN_COLUMNS for limit in self.constraints().values())
        return bool(self.tables.dim >= part * hosts)

    @property
    def _may_split(self) -> bool:
        return self.split_rows or self.tables.optimizer.name != "rowwise_adagrad"

    def splits_states(self, plan: ShardPlan) -> bool:
        """Whether some table's row-wise Adagrad has several states for a row: another algorithm."""
        return any(self._splits_state(table) for table in plan.tables.values())

    def _splits_state(self, table: TablePlan) -> bool:
        narrow = any(s.columns < table.dim for s in table.shards)
        return narrow and self.tables.optimizer.name == "rowwise_adagrad"

    def check(self, plan: ShardPlan, limits: Mapping[str, ParameterConstraints] | None = None) -> None:
        """``UserError`` on a plan that this run cannot carry out, or that changes the optimizer unasked."""
        limits = self.constraints() if limits is None else limits
        if plan.world != self.world:
            raise UserError(
                f"the plan is for {plan.world} ranks and this run has {self.world}; plan anew with task=plan"
            )
        shapes = self.tables.shapes()
        if shapes.keys() != plan.tables.keys():
            name = min(shapes.keys() ^ plan.tables.keys())
            raise UserError(f"the plan and the recipe do not both have the table '{name}'; plan anew")
        for name, table in plan.tables.items():
            if (table.rows, table.dim) != shapes[name][:2]:
                raise UserError(
                    f"the plan has table '{name}' with {table.rows} x {table.dim} values, the recipe with "
                    f"{shapes[name][0]} x {shapes[name][1]}; plan anew with task=plan"
                )
            if self._splits_state(table) and not self.split_rows:
                raise _splits_rows(name, table.sharding)
            types = limits[name].sharding_types if name in limits else None
            if types and table.sharding not in types:
                raise UserError(f"table '{name}' is {table.sharding}, but only {', '.join(types)} is allowed")
            kernels = limits[name].compute_kernels if name in limits else None
            if kernels and table.kernel not in kernels:
                raise UserError(
                    f"table '{name}' is planned for the kernel {table.kernel}, but tiers.kernel and the "
                    f"plugins allow {' or '.join(kernels)} alone; plan anew, or set tiers.kernel as it was"
                )


def _splits_rows(table: str, sharding: str) -> UserError:
    return UserError(
        f"table '{table}': {sharding} gives each part of a row a row-wise Adagrad state of its own, which is "
        "another algorithm; use optim=adagrad or sgd, shard it row_wise or table_wise, or accept it with "
        "tiers.split_rows=true"
    )


def _fused_types(table: str, wanted: Sequence[str] | None) -> list[str]:
    """The types of a table in lower precision: those with FBGEMM's optimizer, whose state stays float32."""
    types = [t for t in wanted or PLANNED if t != ShardingType.DATA_PARALLEL.value]
    if not types:
        raise UserError(
            f"table '{table}': a data_parallel table of lower precision would keep its optimizer's state in "
            "that precision too; store it in fp32, or shard it table_wise or row_wise"
        )
    return types


def _merged(base: ParameterConstraints, limit: ParameterConstraints) -> ParameterConstraints:
    default = ParameterConstraints()
    said = {f.name: getattr(limit, f.name) for f in fields(limit)}
    return replace(base, **{k: v for k, v in said.items() if v != getattr(default, k)})


def _reason(fault: Exception) -> str:
    lines = [line.strip() for line in str(fault).splitlines() if line.strip()]
    return " ".join(lines)[:400] + "; raise the number of ranks, or loosen the limits of the tables"
