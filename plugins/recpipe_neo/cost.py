"""Predicts the time of any shard from a machine's measurements, by non-negative linear models of its work.

Coefficients are fitted to relative errors, so that a short lookup matters as much as a long one. They are
times per unit of work and never negative, which keeps predictions plausible outside of the measured grid.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torchrec.distributed.types import ShardingType

from recpipe_neo.machine_profile import CollectiveSample, ExchangeSample, LookupSample, MachineProfile

Vector = npt.NDArray[np.float64]
DATA_PARALLEL = ShardingType.DATA_PARALLEL.value
FOOTPRINTS = np.log2([2.0**16, 2.0**20, 2.0**22, 2.0**24, 2.0**26])
"""Knots, in bytes of rows that a rank touches in a step; they decide whether its backward pass finds them in
a cache."""
REUSES = np.log2([2.0**16, 2.0**20, 2.0**23, 2.0**26, 2.0**29])
"""Knots, in bytes that a rank touches before it touches the same row again."""


@dataclass(frozen=True)
class Lookup:
    """The lookups of a rank in one shard in a step."""

    rows: float
    dim: float
    bags: float
    lookups: float
    distinct: float

    @property
    def bytes(self) -> float:
        """Bytes of the distinct rows."""
        return self.distinct * self.dim * 4

    def features(self, footprint: float) -> Vector:
        """The amounts of work, given ``footprint`` bytes of rows that the rank touches in the step."""
        reuse = footprint * self.rows / max(self.distinct, 1e-9)
        step, life = _hats(footprint, FOOTPRINTS), _hats(reuse, REUSES)
        dims = np.array([1, self.dim])
        parts = [
            np.array([1.0]),
            self.bags * dims,
            self.lookups * dims,
            self.distinct * dims,
            self.distinct * np.outer(dims, step).ravel(),
            self.distinct * np.outer(dims, life).ravel(),
            self.lookups * np.outer(dims, life).ravel(),
        ]
        return np.concatenate(parts)


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
        self._forward = _fit(features, [sample.forward for sample in profile.lookups])
        self._backward = _fit(features, [sample.backward for sample in profile.lookups])
        self._exchange = {
            kind: self._fit_exchange([s for s in profile.exchanges if s.sharding_type == kind])
            for kind in dict.fromkeys(sample.sharding_type for sample in profile.exchanges)
        }
        self._idle = _idle(profile.collectives)

    def lookup(self, work: Lookup, footprint: float) -> tuple[float, float]:
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
            rows.append(_nnls(work * use / total[:, None], (total - lookups[:, phase]) / total))
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
        work = Lookup(
            sample.rows, sample.dim / sample.columns, sample.samples * ranks, lookups, max(distinct, 1e-9)
        )
        parts = sample.tables * sample.columns
        times = parts * np.array(self.lookup(work, parts * work.bytes))
        fixed = np.array([self._forward[0], self._backward[0]])
        forward, backward = times + fixed
        return np.array([0.0, forward, 0.0 if local else backward])


def _sampled(sample: LookupSample) -> Vector:
    """The features of all tables, preceded by a 1 for the call."""
    work = Lookup(sample.rows, sample.dim, sample.bags, sample.lookups, sample.distinct)
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
        fits[name] = _nnls(features, np.array([1 - s.busy / s.elapsed for s in group]))
    return fits


def _fit(features: Vector, times: Sequence[float]) -> Vector:
    """Coefficients with small relative errors."""
    scale = 1 / np.array(times)
    return _nnls(features * scale[:, None], np.ones(len(scale)))


def _nnls(a: Vector, b: Vector, sweeps: int = 3000) -> Vector:
    """x >= 0, float64 [n], that minimizes |a x - b|, by coordinate descent on the normal equations."""
    size = np.sqrt((a * a).sum(axis=0))
    used = np.flatnonzero(size)
    scaled = a[:, used] / size[used]
    gram, slope = scaled.T @ scaled, scaled.T @ b
    x = [0.0] * len(used)
    for _ in range(sweeps):
        furthest = 0.0
        for j, row in enumerate(gram):
            step = max(-x[j], float(slope[j]))
            if step:  # most coefficients stay 0
                x[j] += step
                slope -= step * row
                furthest = max(furthest, abs(step))
        if furthest < 1e-9:
            break
    result = np.zeros(a.shape[1])
    result[used] = np.array(x) / size[used]
    return result


def _hats(value: float, knots: Vector) -> Vector:
    """Weights (with sum 1) of the ``knots`` next to log2 of ``value``, for linear interpolation."""
    at = float(np.clip(np.log2(max(value, 1.0)), knots[0], knots[-1]))
    return np.array([np.interp(at, knots, knot) for knot in np.eye(len(knots))])
