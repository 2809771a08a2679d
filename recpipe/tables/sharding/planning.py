"""Decides which rank holds which part of each table: by TorchRec's planner, with this machine's memory and
the recipe's limits, or by a plan from a file.

TorchRec does not offer row-wise sharding on CPUs; ``TableSharder`` does. TorchRec offers column-wise sharding
with every optimizer; the tables' limits exclude the wrong ones.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import BaseEmbeddingSharder, EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.types import PlannerError, ShardingOption, Stats
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from recpipe.common.machine import plannable
from recpipe.common.meter import counting
from recpipe.distributed.ranks import Ranks, join_group
from recpipe.errors import UserError
from recpipe.plugin.planner import Planner
from recpipe.plugin.skipper import Skipper, overrides
from recpipe.plugin.tables import TableSet
from recpipe.private_api import module_name
from recpipe.tables.collection import bounds_check
from recpipe.tables.config import KERNELS, TierConfig
from recpipe.tables.groups import ModelTables
from recpipe.tables.owners import RESIDENT, GroupOwner
from recpipe.tables.sharding.claims import ShardClaims, codec_registry, refuse_limit
from recpipe.tables.sharding.plan import ShardPlan, TablePlan, from_torchrec, fused, load_plan, skeleton

COLUMN_SPLITTING = frozenset({"column_wise", "table_column_wise", "grid_shard"})
"""Sharding types that cut a table's rows into columns."""
PLANNED = tuple(t.value for t in ShardingType if t is not ShardingType.GRID_SHARD)
"""The sharding types that TorchRec's planner considers for a table without constraints."""
SEQUENCE_TYPES = tuple(EmbeddingCollectionSharder().sharding_types("cpu"))
"""TorchRec's sharding types for tables whose rows are not pooled."""
MIN_COLUMNS = 128
"""TorchRec's own limit of a column-wise part's width; a grid with fewer parts than hosts makes it fail."""
NO_LIMIT = ParameterConstraints()
NO_OPTION = "No available sharding type and compute kernel"
"""The beginning of TorchRec's RuntimeError if a table's limits leave its planner no choice."""


class TableSharder(EmbeddingBagCollectionSharder):  # type: ignore[misc]
    """TorchRec's sharder with all sharding types, also row-wise ones on CPUs. Limits exclude what does not
    work for a table (``Sharding.constraints``)."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Every type that TorchRec runs on some device."""
        return [t.value for t in ShardingType]


SHARDERS: dict[type[nn.Module], type[BaseEmbeddingSharder[Any]]] = {
    EmbeddingBagCollection: TableSharder,
    EmbeddingCollection: EmbeddingCollectionSharder,
}
"""The sharder for each type of a group's module."""


@dataclass
class Prediction(Stats):  # type: ignore[misc]
    """What a planner predicts for its plan; empty until it has planned."""

    shard_ms: dict[str, list[float]]
    """Predicted milliseconds of each shard, by the table's ``module_name``."""

    def log(self, *, best_plan: list[ShardingOption], **_: Any) -> None:
        """Called by TorchRec's planner with the plan that it chose."""
        for option in best_plan:
            self.shard_ms[option.name] = [float(s.perf.total) if s.perf else 0.0 for s in option.shards]


@dataclass(frozen=True)
class Sharding:
    """Everything that planning and building must agree on."""

    tables: ModelTables
    claims: ShardClaims
    device: torch.device
    world: int
    rank_batch: int
    """Number of samples in one rank's share of a batch, padding included."""
    split_rows: bool
    kernel: str
    cached_share: float
    """Share of a table's rows that ``kernel=uvm_caching`` keeps in device memory."""
    tiered: frozenset[str] = frozenset()
    """Tables whose shards' rows are in tiers, except for data-parallel ones."""

    @cached_property
    def own(self) -> frozenset[str]:
        """Tables that recpipe looks up in TorchRec's modules, except for data-parallel ones: those in tiers,
        and those whose optimizer FBGEMM does not have."""
        updated = (n for n, tables in self.group_of.items() if not tables.optimizer.fused)
        return self.tiered.union(updated)

    @cached_property
    def group_of(self) -> dict[str, TableSet]:
        """The group of each table."""
        return {name: g.tables for g in self.tables.groups for name in g.tables.layout.tables}

    def sharders(self) -> list[Any]:
        """A sharder for each type of collection, with the plugins' codecs.

        The sharder has the optimizer of the group with the most bytes; tables of other groups carry their
        own.
        """
        most = max(self.tables.groups, key=lambda group: group.tables.total_bytes)
        common = fused(most.tables.optimizer)
        if self.device.type == "cuda":  # TorchRec's default would look up row 0 instead
            common |= {"bounds_check_mode": bounds_check(self.device)}
        if self.kernel == "uvm_caching":
            common |= {"cache_load_factor": self.cached_share, "prefetch_pipeline": True}
        kinds = {EmbeddingBagCollection if t.pooled else EmbeddingCollection for t in self.group_of.values()}
        registry = codec_registry(self.claims.codecs, kinds)
        return [
            make(fused_params=common, qcomm_codecs_registry=registry)
            for kind, make in SHARDERS.items()
            if kind in kinds
        ]

    def topology(self) -> Topology:
        """The ranks as TorchRec's planner sees them, with this machine's memory shared among its ranks."""
        local = min(int(os.environ.get("LOCAL_WORLD_SIZE", self.world)), self.world)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local
        hbm = plannable(self.device) if self.device.type == "cuda" else None
        # A planner counts rows in tiers as rows in memory, and would find no place for them.
        shapes = self.tables.shapes()
        tiered = sum(shapes[name][0] * self.group_of[name].record_bytes for name in self.tiered)
        memory, hbm = memory + tiered, None if hbm is None else hbm + tiered
        return Topology(
            world_size=self.world,
            local_world_size=local,
            compute_device=self.device.type,
            hbm_cap=hbm,
            ddr_cap=memory,
        )

    def constraints(self) -> dict[str, ParameterConstraints]:
        """Limits by table: the recipe's kernel, the plugins' constraints, and only sharding types that work.

        ``UserError`` if no sharding type is left for a table.
        """
        kernels = [KERNELS[self.kernel], EmbeddingComputeKernel.DENSE.value]
        limits = {name: ParameterConstraints(compute_kernels=kernels) for name in self.group_of}
        infos = self.tables.infos()
        planner = self.claims.planner
        for name, info in infos.items():
            limit = None if planner is None else planner.call(Planner.constrain, info)
            if planner is not None and limit is not None:
                refuse_limit(name, planner, limit, self.device)
                said = {f.name: getattr(limit, f.name) for f in fields(limit)}
                set_by_it = {k: v for k, v in said.items() if v != getattr(NO_LIMIT, k)}
                limits[name] = replace(limits[name], **set_by_it)
        for name, limit in limits.items():
            wanted = limit.sharding_types or PLANNED
            stored = self.group_of[name].storage
            refused = {kind: self._refused(name, kind, limit, stored) for kind in wanted}
            usable = [kind for kind, why in refused.items() if why is None]
            if not usable:
                raise next(why for why in refused.values() if why is not None)
            if limit.sharding_types or len(usable) < len(PLANNED):
                limit.sharding_types = usable
        return limits

    def _refused(
        self, name: str, kind: str, limit: ParameterConstraints, stored: DataType
    ) -> UserError | None:
        """Why a table cannot be sharded in this way; None: it can."""
        tables, cuts_rows = self.group_of[name], kind in COLUMN_SPLITTING
        one_state = tables.optimizer.name == "rowwise_adagrad"
        optimizer = tables.optimizer
        if not optimizer.fused and (cuts_rows or kind == ShardingType.DATA_PARALLEL.value):
            how = "cuts rows apart" if cuts_rows else "keeps a whole gradient of each table"
            return UserError(
                f"table '{name}': {kind} {how}, and recpipe makes the steps of its optimizer, "
                f"{optimizer.name} (docs/guide/optimizers.md), on whole rows that a batch looks up: shard it "
                "row_wise or table_wise"
            )
        if not optimizer.fused and self.kernel != "fused":
            return UserError(
                f"table '{name}': tiers.kernel={self.kernel} keeps rows for FBGEMM's optimizers, and recpipe "
                f"makes the steps of {optimizer.name}: use tiers.kernel=fused"
            )
        if not tables.pooled and kind not in SEQUENCE_TYPES:
            return UserError(
                f"table '{name}': TorchRec cannot shard an EmbeddingCollection {kind}; use one of "
                f"{', '.join(SEQUENCE_TYPES)}"
            )
        if cuts_rows and one_state and not self.split_rows:
            return _splits_rows(name, kind)
        if cuts_rows and name in self.tiered and (one_state or tables.codec):
            what = "a codec of whole records" if tables.codec else "one optimizer state for a whole row"
            return UserError(
                f"table '{name}': {kind} cuts rows apart, and in tiers its rows have {what}: shard it "
                "row_wise or table_wise"
            )
        skipper = self.claims.skipper
        if cuts_rows and skipper and overrides(skipper.part, Skipper.update):
            return UserError(
                f"table '{name}': {kind} cuts rows apart, and {skipper}, decides by a whole "
                "row's gradient whether to update it: shard it row_wise or table_wise, or drop the plugin"
            )
        if kind == ShardingType.GRID_SHARD.value:
            columns = limit.min_partition or MIN_COLUMNS
            if tables.dim < columns * (self.world // self.topology().local_world_size):
                return UserError(
                    f"table '{name}': grid_shard needs {columns} columns for each host, and its rows have "
                    f"{tables.dim}: use table_row_wise, or raise its dimension"
                )
        if kind == ShardingType.DATA_PARALLEL.value and stored is not DataType.FP32:
            return UserError(
                f"table '{name}': a data_parallel table of lower precision would keep its optimizer's state "
                "in that precision too; store it in fp32, or shard it table_wise or row_wise"
            )
        return None

    def plan(self, group: dist.ProcessGroup | None) -> ShardPlan:
        """Plan all tables of the model together: with the other ranks of ``group``, or alone (None)."""
        topology, limits = self.topology(), self.constraints()
        by_module = {module_name(name): limit for name, limit in limits.items()}
        seen = Prediction({})
        brought = self.claims.planner
        planner = None if brought is None else brought.make(Planner.make, topology, by_module)
        if planner is not None:
            told = getattr(planner, "prediction", None)
            seen = told if isinstance(told, Prediction) else seen
        else:
            planner = EmbeddingShardingPlanner(
                topology=topology, constraints=by_module, batch_size=self.rank_batch, stats=[seen]
            )
        model, sharders = skeleton(self.tables), self.sharders()
        try:
            if group is None:
                made = planner.plan(model, sharders)
            else:
                made = planner.collective_plan(model, sharders, group)
        except (PlannerError, RuntimeError) as fault:
            if not isinstance(fault, PlannerError) and NO_OPTION not in str(fault):
                raise
            lines = [line.strip() for line in str(fault).splitlines() if line.strip()]
            raise UserError(
                f"the planner found no way to place the tables: {' '.join(lines)[:400]}; raise the number of "
                "ranks, or loosen the limits of the tables"
            ) from fault
        plan = from_torchrec(made, self.tables, seen.shard_ms, self.world)
        self.check(plan, limits)
        return plan

    def splits_states(self, plan: ShardPlan) -> bool:
        """Whether some table's row-wise Adagrad would have several states for a row, which is a different
        algorithm."""
        return any(self._splits_state(name, table) for name, table in plan.tables.items())

    def _splits_state(self, name: str, table: TablePlan) -> bool:
        one_state = self.group_of[name].optimizer.name == "rowwise_adagrad"
        return one_state and any(shard.columns < table.dim for shard in table.shards)

    def check(self, plan: ShardPlan, limits: Mapping[str, ParameterConstraints] | None = None) -> None:
        """``UserError`` if this run cannot carry out the plan, or if the plan changes the optimizer
        unasked."""
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
            if self._splits_state(name, table) and not self.split_rows:
                raise _splits_rows(name, table.sharding)
            types = limits[name].sharding_types if name in limits else None
            if types and table.sharding not in types:
                raise UserError(
                    f"table '{name}' is {table.sharding}, but only {', '.join(types)} is allowed"
                    f"{'' if self.group_of[name].pooled else ' of an EmbeddingCollection'}"
                )
            kernels = limits[name].compute_kernels if name in limits else None
            if kernels and table.kernel not in kernels:
                raise UserError(
                    f"table '{name}' is planned for the kernel {table.kernel}, but tiers.kernel and the "
                    f"plugins allow {' or '.join(kernels)} alone; plan anew, or set tiers.kernel as it was"
                )
        # TorchRec cuts all column-wise tables of an ``EmbeddingCollection`` alike.
        for group in self.tables.groups:
            planned = {name: plan.tables[name] for name in group.tables.layout.tables}
            cut = {n: t.shards[0].columns for n, t in planned.items() if t.sharding in COLUMN_SPLITTING}
            if not group.tables.pooled and len(set(cut.values())) > 1:
                raise UserError(
                    f"the tables {', '.join(cut)} of one EmbeddingCollection are cut into parts of "
                    f"{' and '.join(map(str, sorted(set(cut.values()))))} columns, and TorchRec cuts all of "
                    "them alike: give them one min_partition, or shard them row_wise or table_wise"
                )


def _splits_rows(table: str, sharding: str) -> UserError:
    return UserError(
        f"table '{table}': {sharding} gives each part of a row a row-wise Adagrad state of its own, which is "
        "another algorithm; use optim=adagrad or sgd, shard it row_wise or table_wise, or accept it with "
        "tiers.split_rows=true"
    )


@counting("planning the shards")
def plan_shards(
    tables: ModelTables,
    config: TierConfig,
    claims: ShardClaims,
    device: torch.device,
    batch_size: int,
    ranks: Ranks,
    world: int,
    owners: Sequence[GroupOwner] = (),
) -> tuple[Sharding, ShardPlan]:
    """Plan the places of the tables' parts on ``world`` ranks, without allocating them.

    All ranks call it. If ``world`` is not the number of running ranks, each plans alone. ``owners``: the
    owner of each group's resident rows; empty: all rows are resident.
    """
    if len(ranks.trainers) < ranks.world or len(ranks.holders) < ranks.world:
        raise UserError(
            "sharded tables lie on every rank that trains: leave topology.embedding_ranks and trainers null"
        )
    if config.kernel != "fused" and device.type != "cuda":
        raise UserError(
            f"tiers.kernel={config.kernel} needs a GPU, and this run is on a CPU: leave tiers.kernel=fused; "
            "tables larger than memory are what tiers.store=ssd with a caching policy is for"
        )
    tiered = [g for g, owner in zip(tables.groups, owners, strict=False) if owner.name != RESIDENT]
    sharding = Sharding(
        tables,
        claims,
        device,
        world,
        -(-batch_size // world),
        config.split_rows,
        config.kernel,
        config.budget(tables) / tables.total_bytes,
        frozenset(name for group in tiered for name in group.tables.layout.tables),
    )
    sharding.sharders()  # this refuses codecs that could not be carried out
    if config.plan is not None:
        plan = load_plan(Path(config.plan).expanduser())
        sharding.check(plan)
        return sharding, plan
    return sharding, sharding.plan(join_group(device, ranks) if world == ranks.world else None)
