"""Times of tiers, stores, lookups and collectives, from a machine's profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Protocol

import numpy as np

from recpipe.errors import UserError
from recpipe.profiling.limits import Sample
from recpipe_perf_model.kernels.linear import At, Features, Linear, Vector, hats
from recpipe_perf_model.machine import MachineProfile

MAPS = np.log2([2.0**18, 2.0**23])
"""Knots, in bytes of the map from rows to tiers, which decide whether planning finds it in a cache. They are
where the benchmark has samples."""
SLOTS = np.log2([2.0**17, 2.0**21, 2.0**25])
"""Knots, in bytes of the slots."""


class Times(Protocol):
    """Predicts times by the kinds of micro-benchmarks."""

    def seconds(self, kind: str, at: At) -> float:
        """The time of a ``kind`` of work with these sizes; ``UserError`` if it was not measured."""


def _of(names: Sequence[str], at: At) -> list[float]:
    return [float(at[name]) for name in names]


def _plan(at: At) -> Vector:
    lookups, missed, slots, rows = _of(("lookups", "missed", "slots", "rows"), at)
    cache = hats(4 * rows, MAPS)
    return np.array([1.0, lookups, missed, slots, *(lookups * cache), *(missed * cache)])


def _rows(name: str, at: At) -> Vector:
    rows, width = _of((name, "width"), at)
    return np.array([1.0, rows, rows * width])


def _arrive(at: At) -> Vector:
    rows, width, slab = _of(("missed", "width", "slab"), at)
    return np.array([1.0, rows, rows * width, slab, slab * width])


def _slots(at: At) -> Vector:
    bags, hits, hot, slab, slab_lookups, dim, slots = _of(
        ("bags", "hits", "hot", "slab", "slab_lookups", "dim", "slots"), at
    )
    tbes, dims, cache = 1 + (slab > 0), np.array([1, dim]), hats(4 * slots * dim, SLOTS)
    parts = [tbes * bags * dims, (hits + slab_lookups) * dims, np.outer(hot * dims, cache).ravel()]
    return np.concatenate([[1.0, float(slab > 0)], *parts, slab * dims])


def _reorder(at: At) -> Vector:
    lookups, bags = _of(("lookups", "bags"), at)
    return np.array([1.0, lookups, bags])


def _host(at: At) -> Vector:
    rows, width = _of(("rows", "width"), at)
    return np.array([1.0, rows, rows * width])


def _ssd(at: At) -> Vector:
    rows, width, requests, blocks = _of(("rows", "width", "requests", "blocks"), at)
    return np.array([1.0, rows, rows * width, requests, blocks])


def _collective(at: At) -> Vector:
    size, ranks = _of(("bytes", "ranks"), at)
    return np.array([1.0, ranks, size, size * ranks])


def _rows_of_bags(at: At) -> Vector:
    lookups, bags, distinct, dim = _of(("lookups", "bags", "distinct", "dim"), at)
    return np.array([1.0, lookups, distinct, lookups * dim, bags * dim, distinct * dim])


def _sharded(at: At) -> Vector:
    tables, dim, samples, lookups = _of(("tables", "dim", "samples", "lookups"), at)
    return np.array([1.0, tables, lookups, samples * tables * dim])


def _beside(at: At) -> Vector:
    return np.array(_of(("seconds",), at))


def _copy(at: At) -> Vector:
    size, pinned = _of(("bytes", "pinned"), at)
    return np.array([1.0, size, size * (1 - pinned)])


FOOTPRINTS = np.log2([2.0**16, 2.0**20, 2.0**22, 2.0**24, 2.0**26])
"""Knots, in bytes of rows that a rank touches in a step; they decide whether its backward pass finds them in
a cache."""


REUSES = np.log2([2.0**16, 2.0**20, 2.0**23, 2.0**26, 2.0**29])
"""Knots, in bytes that a rank touches before it touches the same row again."""


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


_COPIES = ("read", "write")
COLLECTIVES = ("all_to_all", "reduce_scatter", "all_gather", "all_reduce")
FEATURES: Mapping[str, Features] = {
    "lookup forward": lookup_features,
    "lookup update": lookup_features,
    **{f"plan {policy}": _plan for policy in ("nocache", "lru", "lfu")},
    "advance": partial(_rows, "leaving"),
    "arrive": _arrive,
    "reorder": _reorder,
    "slots forward": _slots,
    "slots update": _slots,
    **{f"host {what}{busy}": _host for what in _COPIES for busy in ("", " busy")},
    **{f"ssd {what}{busy}": _ssd for what in (*_COPIES, "rewrite") for busy in ("", " busy")},
    **{f"{what} {codec}": _host for what in ("encode", "decode") for codec in ("int8", "fp16", "bf16")},
    **dict.fromkeys(("copy to device", "copy to host"), _copy),
    **{f"{what}{busy}": _collective for what in COLLECTIVES for busy in ("", " busy")},
    "side by side": _beside,
    **{f"rows {what}": _rows_of_bags for what in ("look up", "update")},
    **{f"sharded {what}": _sharded for what in ("ids", "forward", "backward")},
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
        samples.sort(key=lambda sample: sample.kind)
        return cls({kind: fit(kind, list(same)) for kind, same in groupby(samples, lambda s: s.kind)})

    def seconds(self, kind: str, at: At) -> float:
        """The predicted time; ``UserError`` if the profile has no such kind."""
        if kind not in self.models:
            raise UserError(f"the machine's profile has no '{kind}': run recpipe perf calibrate")
        return self.models[kind].seconds(at)


def fit(kind: str, samples: Sequence[Sample]) -> Linear:
    """The model of one kind."""
    return Linear.fit(samples, FEATURES[kind])
