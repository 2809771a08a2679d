"""Predicts the time of any shard from a machine's measurements, by non-negative linear models of its work.

Coefficients are fitted to relative errors, so that a short lookup matters as much as a long one. They are
times per unit of work and never negative, which keeps predictions plausible outside of the measured grid.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from recpipe_perf_model import LookupWork, fitted, nnls
from torchrec.distributed.types import ShardingType

from recpipe_neo.machine_profile import CollectiveSample, ExchangeSample, LookupSample, MachineProfile

Vector = npt.NDArray[np.float64]
DATA_PARALLEL = ShardingType.DATA_PARALLEL.value


@dataclass(frozen=True)
class Exchange:
    """What a rank sends, receives and rearranges for a table in a step."""

    tables: float = 0
    """The number of keys of the sharded batch; a table cut by columns counts once for each part."""
    ids_sent: float = 0
    ids_received: float = 0
    floats_sent: float = 0
    floats_received: float = 0
    parameters: float = 0
    """The number of values of a replicated table: gradients are summed over the ranks, and all rows
    updated."""

    def __add__(self, other: Exchange) -> Exchange:
        return Exchange(*(a + b for a, b in zip(self._values, other._values, strict=True)))

    @property
    def _values(self) -> tuple[float, ...]:
        return (
            self.tables, self.ids_sent, self.ids_received, self.floats_sent, self.floats_received,
            self.parameters,
        )  # fmt: skip

    def features(self) -> Vector:
        """The amounts of work of each kind."""
        return np.array(self._values)


def shared(kind: str, dim: float, parts: float, rows: float, samples: float, lookups: float) -> Exchange:
    """What every rank does for a table of ``kind``, wherever its shards are. Samples and lookups are those of
    one rank."""
    if kind == DATA_PARALLEL:
        return Exchange(1, lookups, 0, samples * dim, 0, rows * dim)
    return Exchange(parts, lookups * parts, 0, 0, samples * dim, 0)


def owned(dim: float, bags: float, lookups: float) -> Exchange:
    """What the rank of a shard does in addition. Bags are those of all ranks; lookups are those in the
    shard."""
    return Exchange(0, 0, lookups, bags * dim, 0, 0)


class CostModel:
    """Predicts milliseconds of lookups and exchanges; fitted to a profile."""

    def __init__(self, profile: MachineProfile) -> None:
        self.machine = profile.machine
        features = np.array([_sampled(sample) for sample in profile.lookups])
        self._forward = fitted(features, [sample.forward for sample in profile.lookups])
        self._backward = fitted(features, [sample.backward for sample in profile.lookups])
        self._exchange = {
            kind: self._fit_exchange([s for s in profile.exchanges if s.sharding_type == kind])
            for kind in dict.fromkeys(sample.sharding_type for sample in profile.exchanges)
        }
        self._idle = _idle(profile.collectives)

    def lookup(self, work: LookupWork, footprint: float) -> tuple[float, float]:
        """Milliseconds of forward, and of backward with update; the TBE's fixed costs are in ``fixed``."""
        features = work.features(footprint)
        return float(features @ self._forward[1:]), float(features @ self._backward[1:])

    def exchange(self, kind: str, work: Exchange) -> Vector:
        """Busy milliseconds in input dist, forward and backward, float64 [3], without ``fixed``."""
        times: Vector = self._exchange[kind][:, 1:] @ work.features()
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
        work = np.array([np.concatenate([[1.0], _worked(s, self.machine.world).features()]) for s in samples])
        lookups = np.array([self._lookups(sample) for sample in samples])
        rows = []
        for phase, name in enumerate(("input", "forward", "backward")):
            total = np.array([getattr(sample, name) for sample in samples])
            # Ids are exchanged only in the input dist, pooled rows and gradients only in the other phases; a
            # replicated table's backward pass, which is not a TBE's, also depends on its ids.
            use = np.array([True, True, True, True, *[phase > 0] * 2, phase == 2])
            if phase == 2 or (phase == 1 and samples[0].sharding_type != DATA_PARALLEL):
                use[2:4] = samples[0].sharding_type == DATA_PARALLEL
            rows.append(nnls(work * use / total[:, None], (total - lookups[:, phase]) / total))
        return np.array(rows)

    def _lookups(self, sample: ExchangeSample) -> Vector:
        """Predicted ms of a sample's lookups in input dist, forward and backward."""
        local = sample.sharding_type == DATA_PARALLEL
        ranks = 1 if local else self.machine.world
        rows_cut = sample.sharding_type in (ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value)
        if not sample.owns and not local and not rows_cut:
            return np.zeros(3)
        rows = sample.rows / self.machine.world  # only those that are looked up
        lookups = sample.lookups * ranks if sample.owns or local else 0.0
        distinct = rows * -np.expm1(-lookups / rows)
        work = LookupWork(
            sample.rows, sample.dim / sample.columns, sample.samples * ranks, lookups, max(distinct, 1e-9)
        )
        parts = sample.tables * sample.columns
        times = parts * np.array(self.lookup(work, parts * work.bytes))
        fixed = np.array([self._forward[0], self._backward[0]])
        forward, backward = times + fixed
        return np.array([0.0, forward, 0.0 if local else backward])


def _sampled(sample: LookupSample) -> Vector:
    """The features of all tables, preceded by a 1 for the call."""
    work = LookupWork(sample.rows, sample.dim, sample.bags, sample.lookups, sample.distinct)
    return np.concatenate([[1.0], sample.tables * work.features(sample.tables * work.bytes)])


def _worked(sample: ExchangeSample, world: int) -> Exchange:
    """What a sample's rank sends and receives."""
    size = (sample.rows, sample.samples, sample.lookups)
    one = shared(sample.sharding_type, sample.dim, sample.columns, *size)
    if sample.sharding_type != DATA_PARALLEL:
        rows_cut = sample.sharding_type != ShardingType.TABLE_WISE.value and sample.columns == 1
        bags = sample.samples * world if sample.owns or rows_cut else 0
        lookups = sample.lookups * world * sample.columns if sample.owns else 0
        one = one + owned(sample.dim, bags, lookups)
    return Exchange(*(sample.tables * one.features()))


def _idle(samples: Iterable[CollectiveSample]) -> dict[str, Vector]:
    """For each collective, the elapsed time in which a rank is not busy, as (ms, ms per byte)."""
    groups: dict[str, list[CollectiveSample]] = {}
    for sample in samples:
        groups.setdefault(sample.collective, []).append(sample)
    fits = {}
    for name, group in groups.items():
        features = np.array([(1 / s.elapsed, s.bytes / s.elapsed) for s in group])
        fits[name] = nnls(features, np.array([1 - s.busy / s.elapsed for s in group]))
    return fits
