"""The work of lookups in a table: what its time depends on, caches included."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recpipe_perf_model.kernels.linear import At, Vector, hats

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
