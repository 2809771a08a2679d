"""Measured costs for TorchRec's planner: the time of any lookup and exchange, of a shard, and of a step with
a whole plan.

Times are predicted from a machine's measurements by non-negative linear models of the work. Coefficients are
fitted to relative errors, so that a short lookup matters as much as a long one. They are times per unit of
work and never negative, which keeps predictions plausible outside of the measured grid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from recpipe_perf_model import LookupWork, fitted, nnls
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    Perf,
    PerfModel,
    Shard,
    ShardEstimator,
    ShardingOption,
    Topology,
)
from torchrec.distributed.types import ShardingType

from recpipe_neo.machine_profile import ExchangeSample, MachineProfile
from recpipe_neo.partition import ROW_TYPES, work
from recpipe_neo.stats import FeatureStats

MEASURED_AS = {
    ShardingType.GRID_SHARD.value: ShardingType.TABLE_ROW_WISE.value,
    ShardingType.TABLE_COLUMN_WISE.value: ShardingType.COLUMN_WISE.value,
}
"""For sharding types without a benchmark, the type with the same exchanges on each rank."""
SEQUENCES_AS = ShardingType.TABLE_WISE.value
"""Likewise for rows that are not pooled: the rank that has them sends them back, and no type sums them."""
INPUT_EXCHANGES = 3
"""The number of all-to-alls of an input dist: sizes, lengths, ids."""
Vector = npt.NDArray[np.float64]
DATA_PARALLEL = ShardingType.DATA_PARALLEL.value
CUT_BY_ROWS = (ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value)
"""Measured types whose shards are cut by rows."""


def exchanged(
    tables: float = 0,
    ids_sent: float = 0,
    ids_received: float = 0,
    floats_sent: float = 0,
    floats_received: float = 0,
    parameters: float = 0,
) -> Vector:
    """What a rank sends, receives and rearranges for a table in a step, float64 [6].

    ``tables``: keys of the sharded batch; a table cut by columns counts once for each part. ``parameters``:
    values of a replicated table, whose gradients are summed over the ranks and whose rows are all updated.
    """
    return np.array([tables, ids_sent, ids_received, floats_sent, floats_received, parameters])


def shared(kind: str, dim: float, parts: float, rows: float, samples: float, lookups: float) -> Vector:
    """What every rank does for a table of ``kind``, wherever its shards are, as ``exchanged``. Samples and
    lookups are those of one rank."""
    if kind == DATA_PARALLEL:
        return exchanged(1, lookups, floats_sent=samples * dim, parameters=rows * dim)
    return exchanged(parts, lookups * parts, floats_received=samples * dim)


def owned(dim: float, bags: float, lookups: float) -> Vector:
    """What the rank of a shard does in addition. Bags are those of all ranks; lookups are those in the
    shard."""
    return exchanged(ids_received=lookups, floats_sent=bags * dim)


class CostModel:
    """Predicts milliseconds of lookups and exchanges; fitted to a profile."""

    def __init__(self, profile: MachineProfile) -> None:
        self.machine = profile.machine
        features = []
        for s in profile.lookups:
            work = LookupWork(s.rows, s.dim, s.bags, s.lookups, s.distinct)
            # A 1 for the call, then the features of all tables.
            features.append([1.0, *(s.tables * work.features(s.tables * work.bytes))])
        self._forward = fitted(np.array(features), [sample.forward for sample in profile.lookups])
        self._backward = fitted(np.array(features), [sample.backward for sample in profile.lookups])
        self._exchange = {
            kind: self._fit_exchange([s for s in profile.exchanges if s.sharding_type == kind])
            for kind in dict.fromkeys(sample.sharding_type for sample in profile.exchanges)
        }
        self._idle: dict[str, Vector] = {}
        """For each collective, the elapsed time in which a rank is not busy, as (ms, ms per byte)."""
        for name in dict.fromkeys(sample.collective for sample in profile.collectives):
            group = [sample for sample in profile.collectives if sample.collective == name]
            sizes = np.array([(1 / s.elapsed, s.bytes / s.elapsed) for s in group])
            self._idle[name] = nnls(sizes, np.array([1 - s.busy / s.elapsed for s in group]))

    def lookup(self, work: LookupWork, footprint: float) -> tuple[float, float]:
        """Milliseconds of forward, and of backward with update; the TBE's fixed costs are in ``fixed``."""
        features = work.features(footprint)
        return float(features @ self._forward[1:]), float(features @ self._backward[1:])

    def exchange(self, kind: str, work: Vector) -> Vector:
        """Busy milliseconds in input dist, forward and backward, float64 [3], without ``fixed``."""
        times: Vector = self._exchange[kind][:, 1:] @ work
        return times

    def fixed(self, kind: str) -> Vector:
        """Busy milliseconds in input dist, forward and backward of every step with a table of ``kind``."""
        forward, backward = self._forward[0], self._backward[0]
        lookups = np.array([0.0, forward, 0.0 if kind == DATA_PARALLEL else backward])
        times: Vector = self._exchange[kind][:, 0] + lookups
        return times

    def idle(self, name: str, size: float) -> float:
        """Milliseconds that a rank waits in a collective of ``size`` bytes on each."""
        return float(self._idle[name] @ (1.0, size))

    def _fit_exchange(self, samples: Sequence[ExchangeSample]) -> Vector:
        """Coefficients [3, 1 + features] for the time of each phase that is left after the lookups' own
        time."""
        kind, world, work = samples[0].sharding_type, self.machine.world, []
        for s in samples:
            one = shared(kind, s.dim, s.columns, s.rows, s.samples, s.lookups)
            if kind != DATA_PARALLEL:
                rows_cut = kind != ShardingType.TABLE_WISE.value and s.columns == 1
                bags = s.samples * world if s.owns or rows_cut else 0
                one = one + owned(s.dim, bags, s.lookups * world * s.columns if s.owns else 0)
            work.append([1.0, *(s.tables * one)])
        lookups = np.array([self._lookups(sample) for sample in samples])
        rows = []
        for phase, name in enumerate(("input", "forward", "backward")):
            total = np.array([getattr(sample, name) for sample in samples])
            # Ids are exchanged only in the input dist, pooled rows and gradients only in the other phases; a
            # replicated table's backward pass, which is not a TBE's, also depends on its ids.
            use = np.array([True, True, True, True, *[phase > 0] * 2, phase == 2])
            if phase == 2 or (phase == 1 and kind != DATA_PARALLEL):
                use[2:4] = kind == DATA_PARALLEL
            rows.append(nnls(np.array(work) * use / total[:, None], (total - lookups[:, phase]) / total))
        return np.array(rows)

    def _lookups(self, sample: ExchangeSample) -> Vector:
        """Predicted ms of a sample's lookups in input dist, forward and backward."""
        local = sample.sharding_type == DATA_PARALLEL
        ranks = 1 if local else self.machine.world
        if not sample.owns and not local and sample.sharding_type not in CUT_BY_ROWS:
            return np.zeros(3)
        rows = sample.rows / self.machine.world  # only those that are looked up
        lookups = sample.lookups * ranks if sample.owns or local else 0.0
        distinct = rows * -np.expm1(-lookups / rows)
        work = LookupWork(
            sample.rows, sample.dim / sample.columns, sample.samples * ranks, lookups, max(distinct, 1e-9)
        )
        parts = sample.tables * sample.columns
        times = parts * np.array(self.lookup(work, parts * work.bytes))
        forward, backward = times + np.array([self._forward[0], self._backward[0]])
        return np.array([0.0, forward, 0.0 if local else backward])


class TableCosts:
    """The costs of tables' shards on one machine, by a cost model and the tables' statistics."""

    def __init__(self, model: CostModel, stats: Mapping[str, FeatureStats], topology: Topology) -> None:
        self.model = model
        self.stats = stats
        self.world = topology.world_size
        self.local_world = topology.local_world_size
        self.cuda = topology.compute_device == "cuda"
        self._touched: dict[str, float] = {}

    @staticmethod
    def measured_as(option: ShardingOption) -> str:
        """The measured type with the same exchanges as ``option``."""
        kind: str = MEASURED_AS.get(option.sharding_type, option.sharding_type)
        return SEQUENCES_AS if not option.is_pooled and kind in ROW_TYPES else kind

    def know(self, options: Sequence[ShardingOption]) -> None:
        """Note the options' tables, all of which compete for the caches."""
        for option in options:
            if option.fqn not in self._touched:
                rows, dim = option.tensor.shape
                _, distinct = self._looked_up(option, 0, rows, option.batch_size * self.world)
                self._touched[option.fqn] = distinct * dim * 4

    def shard(self, option: ShardingOption, shard: Shard) -> Perf:
        """Milliseconds that the shard's rank is busy with it, in addition to ``shared``."""
        (rows, dim), start = shard.size, shard.offset[0]
        local = option.sharding_type == DATA_PARALLEL
        samples = option.batch_size * (1 if local else self.world)
        lookups, distinct = self._looked_up(option, start, start + rows, samples)
        bags = self._handed_out(option, samples, lookups)
        footprint = sum(self._touched.values()) / self.world
        forward, backward = self.model.lookup(LookupWork(rows, dim, bags, lookups, distinct), footprint)
        if local:  # ``shared`` includes its dense gradient and update
            return Perf(forward, 0.0, 0.0, 0.0)
        exchange = self.model.exchange(self.measured_as(option), owned(dim, bags, lookups))
        return Perf(forward, exchange[1], backward, exchange[2], exchange[0])

    def shared(self, option: ShardingOption) -> Vector:
        """Milliseconds in input dist, forward and backward that every rank is busy for the table."""
        rows, dim = option.tensor.shape
        columns = len({shard.offset[1] for shard in option.shards})
        lookups, _ = self._looked_up(option, 0, rows, option.batch_size)
        vectors = self._handed_out(option, option.batch_size, lookups)
        kind = self.measured_as(option)
        return self.model.exchange(kind, shared(kind, dim, columns, rows, vectors, lookups))

    def total(self, option: ShardingOption) -> float:
        """Milliseconds of the table on all ranks together."""
        shards = sum(work(cast(Perf, shard.perf)) for shard in option.shards)
        return float(shards + self.world * self.shared(option).sum())

    def idle(self, kind: str, options: Sequence[ShardingOption]) -> Vector:
        """Milliseconds that ranks wait in the collectives of one type and collection, in each phase."""
        idle = self.model.idle
        if kind == DATA_PARALLEL:
            return np.array([0.0, 0.0, idle("all_reduce", sum(o.tensor.numel() * 4.0 for o in options))])
        ids = pooled = 0.0
        for option in options:
            rows, dim = option.tensor.shape
            lookups, _ = self._looked_up(option, 0, rows, option.batch_size)
            ids += lookups * 8.0
            pooled += self._handed_out(option, option.batch_size, lookups) * dim * 4.0
        exchange = (INPUT_EXCHANGES - 1) * idle("all_to_all", 0) + idle("all_to_all", ids)
        if kind in ROW_TYPES:
            return np.array(
                [exchange, idle("reduce_scatter", pooled * self.world), idle("all_gather", pooled)]
            )
        return np.array([exchange, idle("all_to_all", pooled), idle("all_to_all", pooled)])

    def _handed_out(self, option: ShardingOption, samples: float, lookups: float) -> float:
        """The number of vectors that a table returns for ``samples`` samples: one for each bag, or for each
        lookup."""
        return float(samples * len(option.input_lengths)) if option.is_pooled else lookups

    def _looked_up(
        self, option: ShardingOption, start: int, stop: int, samples: float
    ) -> tuple[float, float]:
        """The numbers of lookups and of distinct rows in rows ``start`` to ``stop`` of a table."""
        found = [self.stats[name] for name in _feature_names(option) if name in self.stats]
        if found:
            totals = np.sum([stats.within(start, stop, samples) for stats in found], axis=0)
            return float(totals[0]), float(min(totals[1], stop - start))
        lookups = samples * sum(option.input_lengths) * (stop - start) / option.tensor.shape[0]
        return lookups, (stop - start) * -np.expm1(-lookups / max(stop - start, 1))


def _feature_names(option: ShardingOption) -> list[str]:
    module = cast(Any, option.module[1])
    for config in module.embedding_bag_configs() if option.is_pooled else module.embedding_configs():
        if config.name == option.name:
            return list(config.feature_names)
    raise AssertionError(f"{option.fqn} is a table of its module")


class MeasuredEstimator(ShardEstimator):  # type: ignore[misc]
    """Sets ``Shard.perf`` (ms) by measurements of this machine instead of TorchRec's bandwidths."""

    def __init__(
        self,
        topology: Topology,
        constraints: dict[str, ParameterConstraints] | None = None,
        *,
        costs: TableCosts,
    ) -> None:
        self.costs = costs

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: Any = None) -> None:
        """Sets ``perf`` of all shards of ``sharding_options``."""
        self.costs.know(sharding_options)
        for option in sharding_options:
            for shard in option.shards:
                shard.perf = self.costs.shard(option, shard)


class MeasuredStep(PerfModel):  # type: ignore[misc]
    """Rates a plan by the predicted time of a step's embedding part."""

    def __init__(self, costs: TableCosts) -> None:
        self.costs = costs

    def busy(self, plan: Sequence[ShardingOption]) -> Vector:
        """Milliseconds of each rank in input dist, forward and backward, float64 [W, 3]."""
        everywhere = np.zeros(3)
        for kind, _ in self._exchanges(plan):
            everywhere += self.costs.model.fixed(kind)
        for option in plan:
            everywhere += self.costs.shared(option)
        ranks = np.tile(everywhere, (self.costs.world, 1))
        for option in plan:
            for shard in option.shards:
                perf = cast(Perf, shard.perf)
                ranks[cast(int, shard.rank)] += (
                    perf.input_dist_comms,
                    perf.fwd_compute + perf.fwd_comms,
                    perf.bwd_compute + perf.bwd_comms,
                )
        return ranks

    def _exchanges(self, plan: Sequence[ShardingOption]) -> list[tuple[str, list[ShardingOption]]]:
        """The tables that share exchanges (of one collection and type), with the type that they are measured
        as."""
        alike: dict[tuple[str, str], list[ShardingOption]] = {}
        for option in plan:
            alike.setdefault((option.path, option.sharding_type), []).append(option)
        return [(self.costs.measured_as(options[0]), options) for options in alike.values()]

    def rate(self, plan: list[ShardingOption]) -> float:
        """Milliseconds of a step.

        Ranks wait for each other when pooled rows and when the next batch's ids are exchanged. Between these,
        the slowest rank counts, or the host's cores if it has fewer cores than busy ranks.
        """
        ranks = self.busy(plan)
        waiting = np.zeros(3)
        for kind, options in self._exchanges(plan):
            waiting += self.costs.idle(kind, options)
        step = 0.0
        for busy in (ranks[:, 1], ranks[:, 0] + ranks[:, 2]):
            longest = busy.max()
            if not self.costs.cuda:
                hosts = busy.reshape(-1, self.costs.local_world).sum(axis=1)
                longest = max(longest, (hosts / self.costs.model.machine.cores).max())
            step += float(longest)
        return float(step + waiting.sum())
