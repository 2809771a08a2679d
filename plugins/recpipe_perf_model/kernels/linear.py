"""Non-negative linear models of times: of moving rows, stores, lookups and messages between ranks.

Coefficients are times per unit of work. Fitted to relative errors, a short time matters as much as a long
one; never negative, they keep predictions plausible outside of what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from math import prod
from operator import attrgetter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from recpipe.errors import UserError
from recpipe.profiling.limits import Sample
from recpipe_perf_model.machine import MachineProfile

Vector = NDArray[np.float64]
At = Mapping[str, float | str]
Features = Callable[[At], Vector]
"""The amounts of work of each kind, from a sample's sizes."""
MAPS = np.log2([2.0**18, 2.0**23])
"""Knots, in bytes of the map from rows to tiers, which decide whether planning finds it in a cache. They are
where the benchmark has samples."""
SLOTS = np.log2([2.0**17, 2.0**21, 2.0**25])
"""Knots, in bytes of the slots."""
FOOTPRINTS = np.log2([2.0**16, 2.0**20, 2.0**22, 2.0**24, 2.0**26])
"""Knots, in bytes of rows that a rank touches in a step; they decide whether its backward pass finds them in
a cache."""
REUSES = np.log2([2.0**16, 2.0**20, 2.0**23, 2.0**26, 2.0**29])
"""Knots, in bytes that a rank touches before it touches the same row again."""
COLLECTIVES = ("all_to_all", "reduce_scatter", "all_gather", "all_reduce")
COLLECTIVE_FAMILY = "collectives"
"""The family of a machine's profile that samples of messages between ranks are in."""


@dataclass(frozen=True)
class Linear:
    """A time as a sum of amounts of work, each times its coefficient."""

    features: Features
    coefficients: Vector
    spread: float
    """The standard deviation of the logarithm of measured over fitted times."""

    @classmethod
    def fit(cls, samples: Sequence[Sample], features: Features) -> Linear:
        """The model with the least relative errors on ``samples``."""
        amounts = np.array([features(sample.at) for sample in samples])
        seconds = np.array([sample.seconds for sample in samples])
        found = fitted(amounts, seconds)
        ratios = np.log(seconds / np.maximum(amounts @ found, 1e-12))
        return cls(features, found, float(np.sqrt(np.mean(ratios**2))))

    def seconds(self, at: At) -> float:
        """The predicted time of work of these sizes."""
        return float(self.features(at) @ self.coefficients)


def fitted(amounts: Vector, times: Sequence[float] | Vector) -> Vector:
    """Coefficients [n] with small relative errors of ``amounts @ coefficients``, for amounts [samples, n]."""
    scale = 1 / np.asarray(times)
    return _solved((amounts * scale[:, None]).tobytes(), amounts.shape).copy()


@lru_cache(maxsize=256)
def _solved(relative: bytes, shape: tuple[int, ...]) -> Vector:
    """Advice asks for the same fits again for each machine that it imagines."""
    return nnls(np.frombuffer(relative).reshape(shape), np.ones(shape[0]))


def nnls(a: Vector, b: Vector, sweeps: int = 3000) -> Vector:
    """x >= 0, float64 [n], that minimizes ``|a x - b|``, by coordinate descent on the normal equations."""
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


def hats(value: float, knots: Vector) -> Vector:
    """Weights (with sum 1) of the ``knots`` next to log2 of ``value``, for linear interpolation."""
    at = float(np.clip(np.log2(max(value, 1.0)), knots[0], knots[-1]))
    return np.array([np.interp(at, knots, knot) for knot in np.eye(len(knots))])


class Times(Protocol):
    """Predicts times by the kinds of micro-benchmarks."""

    def seconds(self, kind: str, at: At) -> float:
        """The time of a ``kind`` of work with these sizes; ``UserError`` if it was not measured."""


def _sums(*terms: str, call: bool = True) -> Features:
    """Features that are products of sizes, each named by a term as ``rows width``; before them a 1 for the
    call."""

    def features(at: At) -> Vector:
        own = [prod(float(at[name]) for name in term.split()) for term in terms]
        return np.array([1.0, *own] if call else own)

    return features


def _plan(at: At) -> Vector:
    lookups, missed, slots, rows = (float(at[name]) for name in ("lookups", "missed", "slots", "rows"))
    cache = hats(4 * rows, MAPS)
    return np.array([1.0, lookups, missed, slots, *(lookups * cache), *(missed * cache)])


def _slots(at: At) -> Vector:
    names = ("bags", "hits", "hot", "slab", "slab_lookups", "dim", "slots")
    bags, hits, hot, slab, slab_lookups, dim, slots = (float(at[name]) for name in names)
    tbes, dims, cache = 1 + (slab > 0), np.array([1, dim]), hats(4 * slots * dim, SLOTS)
    parts = [tbes * bags * dims, (hits + slab_lookups) * dims, np.outer(hot * dims, cache).ravel()]
    return np.concatenate([[1.0, float(slab > 0)], *parts, slab * dims])


@dataclass(frozen=True)
class LookupWork:
    """The lookups of a process in one table, or in one shard, in a step."""

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
        """The amounts of work, given ``footprint`` bytes of rows that the process touches in the step."""
        reuse = footprint * self.rows / max(self.distinct, 1e-9)
        step, life = hats(footprint, FOOTPRINTS), hats(reuse, REUSES)
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


def lookup_features(at: At) -> Vector:
    """The work of one TBE's call, from a sample's sizes: of ``tables`` equal tables, preceded by a 1 for the
    call. ``footprint``, if it is given, counts the bytes that the step touches in other tables too."""
    work = LookupWork(*(float(at[name]) for name in ("rows", "dim", "bags", "lookups", "distinct")))
    tables = float(at["tables"])
    footprint = float(at.get("footprint", tables * work.bytes))
    return np.concatenate([[1.0], tables * work.features(footprint)])


_HOST = _sums("rows", "rows width")
_SSD = _sums("rows", "rows width", "requests", "blocks")
_COLLECTIVE = _sums("ranks", "bytes", "bytes ranks")
_ROWS = _sums("lookups", "distinct", "lookups dim", "bags dim", "distinct dim")
_SHARDED = _sums("tables", "lookups", "samples tables dim")
_BUSY = ("", " busy")
FEATURES: Mapping[str, Features] = {
    "lookup forward": lookup_features,
    "lookup update": lookup_features,
    **{f"plan {policy}": _plan for policy in ("nocache", "lru", "lfu")},
    "advance": _sums("leaving", "leaving width"),
    "arrive": _sums("missed", "missed width", "slab", "slab width"),
    "reorder": _sums("lookups", "bags"),
    "slots forward": _slots,
    "slots update": _slots,
    **{f"host {what}{busy}": _HOST for what in ("read", "write") for busy in _BUSY},
    **{f"ssd {what}{busy}": _SSD for what in ("read", "write", "rewrite") for busy in _BUSY},
    **{f"{what} {codec}": _HOST for what in ("encode", "decode") for codec in ("int8", "fp16", "bf16")},
    **{f"{what}{busy}": _COLLECTIVE for what in COLLECTIVES for busy in _BUSY},
    "side by side": _sums("seconds", call=False),
    **{f"rows {what}": _ROWS for what in ("look up", "update")},
    **{f"sharded {what}": _SHARDED for what in ("ids", "forward", "backward")},
}
"""What the time of each kind depends on."""


@dataclass(frozen=True)
class MoveTimes:
    """Non-negative linear models, one for each kind that was measured."""

    models: Mapping[str, Linear]

    @classmethod
    def of(cls, profile: MachineProfile) -> MoveTimes:
        """Fit the kinds of ``FEATURES`` that ``profile`` has."""
        samples = [each for family in profile.samples.values() for each in family if each.kind in FEATURES]
        kind_of = attrgetter("kind")
        by_kind = groupby(sorted(samples, key=kind_of), kind_of)
        return cls({kind: Linear.fit(list(same), FEATURES[kind]) for kind, same in by_kind})

    def seconds(self, kind: str, at: At) -> float:
        """The predicted time; ``UserError`` if the profile has no such kind."""
        if kind not in self.models:
            raise UserError(f"the machine's profile has no '{kind}': run recpipe perf calibrate")
        return self.models[kind].seconds(at)
