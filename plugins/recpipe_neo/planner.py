"""The planners: TorchRec's own, Neo's greedy and Karmarkar-Karp placement, and one by measured costs."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from recpipe_perf_model import Host, SharedProfile
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.perf_models import NoopPerfModel
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.types import Perf, PerfModel, ShardingOption, Topology
from torchrec.distributed.types import ModuleSharder, ShardingPlan, ShardingPlanner

from recpipe.kit import Prediction, module_name
from recpipe.plugin import UserError
from recpipe_neo.estimate import CostModel, MeasuredEstimator, MeasuredStep, TableCosts
from recpipe_neo.machine_profile import Machine, MachineProfile, known_collectives, machines
from recpipe_neo.measure import measure
from recpipe_neo.partition import (
    BestPartitioner,
    GreedyPartitioner,
    KarmarkarKarpPartitioner,
    LargestLoad,
    SplitProposer,
    work,
)
from recpipe_neo.stats import FeatureStats

logger = logging.getLogger("recpipe")

PLANNERS = ("torchrec", "greedy", "karmarkar_karp", "measured")
Constraints = dict[str, ParameterConstraints]
Sharders = list[ModuleSharder[nn.Module]]
T = TypeVar("T")


class PlanRecord(Prediction):
    """What a planner predicted for the plan that it chose; filled on rank 0, which plans."""

    def __init__(self) -> None:
        super().__init__({})
        self.model: PerfModel | None = None
        self.step_ms: float | None = None
        """Predicted time of a step's embedding part, in ms of the planner's own cost model."""
        self.ranks: dict[int, dict[str, float]] = {}
        """The predicted ms of a table's shards on a rank, by rank and table."""
        self.sharding: dict[str, str] = {}
        """The sharding type of each table."""
        self.busy_ms: list[float] = []
        """The predicted ms of each rank, including the exchanges that all ranks share; only for a measured
        plan."""

    def log(self, *, best_plan: list[ShardingOption], **said: Any) -> None:
        """Called by TorchRec with the chosen plan."""
        super().log(best_plan=best_plan)
        self.ranks = {rank: {} for rank in range(said["topology"].world_size)}
        self.sharding = {option.name: option.sharding_type for option in best_plan}
        for option in best_plan:
            for shard in option.shards:
                if shard.rank is not None and shard.rank >= 0:  # -1: no plan was found
                    tables = self.ranks[shard.rank]
                    tables[option.name] = tables.get(option.name, 0.0) + work(cast(Perf, shard.perf))
        if self.model is not None and any(self.ranks.values()):
            self.step_ms = self.model.rate(best_plan)
        if isinstance(self.model, MeasuredStep):
            self.busy_ms = self.model.busy(best_plan).sum(axis=1).tolist()


def make_planner(
    kind: str,
    topology: Topology,
    constraints: Mapping[str, ParameterConstraints],
    batch_size_per_rank: int,
    stats: Mapping[str, FeatureStats] | None = None,
    profile_dir: Path | None = None,
    record: PlanRecord | None = None,
    features: Mapping[str, Sequence[str]] | None = None,
) -> ShardingPlanner:
    """Make the planner of ``kind``, one of ``PLANNERS``; its sharder should be core's ``TableSharder``.

    ``constraints`` limit each table's sharding types and kernels. Column-wise options are cut at
    ``min_partition`` columns. ``stats`` of features: see ``feature_stats``. Without them, the constraints'
    ``pooling_factors`` give the expected lookups; TorchRec's own planner uses only those. ``features``: the
    features of each table, by its ``module_name``; None: every table has one feature with its name.
    ``profile_dir``: where ``measured`` keeps this machine's measurements. ``record`` gets the predictions.
    Raises ``UserError`` for an unknown kind, or when ``measured`` lacks its directory.
    """
    if kind not in PLANNERS:
        raise UserError(f"planner={kind} is unknown; choose one of {', '.join(PLANNERS)}")
    limits = dict(constraints)
    note = record or PlanRecord()
    if kind == "measured":
        if profile_dir is None:
            raise UserError("planner=measured keeps its measurements in a directory; name one")
        return MeasuredPlanner(topology, limits, batch_size_per_rank, stats or {}, profile_dir, note)
    if kind == "torchrec":
        note.model = NoopPerfModel(topology)
        return EmbeddingShardingPlanner(
            topology=topology, constraints=limits, batch_size=batch_size_per_rank, stats=note, debug=False
        )
    note.model = LargestLoad(topology.world_size)
    return EmbeddingShardingPlanner(
        topology=topology,
        constraints=_with_pooling(limits, stats or {}, features),
        batch_size=batch_size_per_rank,
        proposer=SplitProposer(topology.world_size),
        partitioner=GreedyPartitioner() if kind == "greedy" else KarmarkarKarpPartitioner(),
        performance_model=note.model,
        stats=note,
        debug=False,
    )


class MeasuredPlanner(ShardingPlanner):  # type: ignore[misc]
    """Plans by the times of lookups and exchanges on this machine, which are measured once and saved.

    Proposes whole and cut tables, places them by greedy and by largest differencing, and takes the plan
    with the lowest predicted step. Rank 0 plans; TorchRec sends the plan to the others.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: Constraints,
        batch_size: int,
        stats: Mapping[str, FeatureStats],
        profile_dir: Path,
        record: PlanRecord,
    ) -> None:
        self.topology = topology
        self.constraints = constraints
        self.batch_size = batch_size
        self.stats = stats
        self.profile_dir = profile_dir
        self.record = record
        self.profile: MachineProfile | None = None

    def collective_plan(
        self, module: nn.Module, sharders: Sharders, pg: dist.ProcessGroup | None = None
    ) -> ShardingPlan:
        """Every rank of ``pg`` (by default all) must call this. If there is no profile yet, all measure."""
        group = pg or dist.group.WORLD
        assert group is not None, "planning for several ranks needs their process group"
        device = torch.device(self.topology.compute_device)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        self.profile = load_or_measure(self.profile_dir, group, device, fused_optimizer(sharders))
        return self._planner(self.profile).collective_plan(module, sharders, group)

    def plan(self, module: nn.Module, sharders: Sharders) -> ShardingPlan:
        """Plan alone, by the profile of an earlier run with the same number of ranks; ``UserError`` if there
        is none."""
        if self.profile is None:
            optimizer = fused_optimizer(sharders)
            self.profile = saved_profile(self.profile_dir, self.topology.world_size, optimizer)
        return self._planner(self.profile).plan(module, sharders)

    def _planner(self, profile: MachineProfile) -> EmbeddingShardingPlanner:
        costs = TableCosts(CostModel(profile), self.stats, self.topology)
        model = MeasuredStep(costs)
        self.record.model = model
        estimators = [
            MeasuredEstimator(self.topology, self.constraints, costs=costs),
            EmbeddingStorageEstimator(topology=self.topology, constraints=self.constraints),
        ]
        return EmbeddingShardingPlanner(
            topology=self.topology,
            constraints=self.constraints,
            batch_size=self.batch_size,
            enumerator=EmbeddingEnumerator(self.topology, self.batch_size, self.constraints, estimators),
            proposer=SplitProposer(self.topology.world_size, costs.total, thorough=True),
            partitioner=BestPartitioner([GreedyPartitioner(), KarmarkarKarpPartitioner()], model),
            performance_model=model,
            stats=self.record,
            debug=False,
        )


def fused_optimizer(sharders: Sharders) -> EmbOptimType:
    """The optimizer that the sharders fuse into the backward pass; TorchRec's default is SGD."""
    for sharder in sharders:
        fused = getattr(sharder, "fused_params", None) or {}
        if "optimizer" in fused:
            return cast(EmbOptimType, fused["optimizer"])
    return EmbOptimType.EXACT_SGD


def saved_profile(folder: Path, world: int, optimizer: EmbOptimType) -> MachineProfile:
    """What was measured last between ``world`` ranks; ``UserError`` if that is nothing."""
    files = sorted(folder.glob("machine-*.json"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files:
        own = SharedProfile.load(file)
        families = own.profile.samples
        for machine in machines(own.profile.host, families):
            if (machine.world, machine.optimizer) == (world, optimizer.value):
                found = MachineProfile.of(families, machine)
                if found is not None:
                    return found
    raise UserError(
        f"{folder} has no measurements of {world} ranks and {optimizer.value}: make them with torchrun "
        f"--nproc-per-node={world} -m recpipe task=plan +plugin=neo, or choose another plugins.neo.planner"
    )


def load_or_measure(
    folder: Path, group: dist.ProcessGroup, device: torch.device, optimizer: EmbOptimType
) -> MachineProfile:
    """What rank 0 finds of these ranks in this machine's profile in ``folder``, on every rank; what it lacks
    is measured by all ranks, and joins it."""
    machine, first = Machine.current(group, device, optimizer), group.rank() == 0
    known = SharedProfile.of(folder, Host.current(device)) if first else None
    found = MachineProfile.of(known.profile.samples, machine) if known is not None else None
    found = _from_first(found, group, device)
    if found is not None:
        return found
    began = time.process_time()
    if first:
        logger.info("neo: measuring this machine's embedding operations; this takes 10 s to a minute, once")
    samples = {} if known is None else known.profile.samples
    collectives = known_collectives(samples, machine.world, machine.threads)
    there = _from_first(bool(collectives), group, device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):  # the run's are its own
        profile = measure(group, device, optimizer, there)
    own = torch.tensor([time.process_time() - began], dtype=torch.float64, device=device)
    dist.all_reduce(own, group=group)
    if first:
        assert known is not None, "rank 0 has read it"
        profile = profile if profile.collectives else dataclasses.replace(profile, collectives=collectives)
        why = known.joined(profile.families(), machine.at, float(own))
        if why:
            logger.warning("neo: measured; used now and not kept: %s", why)
        else:
            logger.info("neo: measured; kept in %s", known.file)
    return _from_first(profile, group, device)


def _from_first(value: T, group: dist.ProcessGroup, device: torch.device) -> T:
    """Rank 0's value."""
    box = [value]
    dist.broadcast_object_list(box, group=group, device=device, group_src=0)
    return box[0]


def _with_pooling(
    constraints: Constraints,
    stats: Mapping[str, FeatureStats],
    features: Mapping[str, Sequence[str]] | None,
) -> Constraints:
    """The constraints by table name, with measured pooling factors for TorchRec's analytic costs if the user
    gave none."""
    limits = dict(constraints)
    for name, of_table in (features or {module_name(feature): [feature] for feature in stats}).items():
        limit = limits.get(name, ParameterConstraints())
        known = all(feature in stats for feature in of_table)
        if known and limit.pooling_factors == ParameterConstraints().pooling_factors:
            factors = [stats[feature].lookups_per_sample for feature in of_table]
            limits[name] = dataclasses.replace(limit, pooling_factors=factors)
    return limits
