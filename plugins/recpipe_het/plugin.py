"""HET as a plugin: its own implementation of tables, and figures for the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from recpipe.kit import HeldRows, HoldersStore, Lfu, Lru, TableCollection, TierParts
from recpipe.plugin import (
    Cache,
    CachePolicy,
    Context,
    Contribution,
    Figure,
    Invariant,
    Plugin,
    PluginError,
    RowSpace,
)
from recpipe_het.bounds import Bounds
from recpipe_het.lines import Lines
from recpipe_het.policy import LfuOpt
from recpipe_het.rounds import Rounds, Totals
from recpipe_het.tables import HetTables

CACHES: dict[str, type[CachePolicy]] = {"lru": Lru, "lfu": Lfu, "lfuopt": LfuOpt}


class HET(Plugin):
    """Each trainer caches rows, which may lack a bounded number of updates (VLDB'22)."""

    api = (2, 0)
    alters = frozenset({Invariant.EXACT_GRADIENT})

    def __init__(self, *, bound: int, bounds: Mapping[str, int] | None, cache: str) -> None:
        if bounds is not None and not isinstance(bounds, Mapping):
            raise PluginError(f"plugins.het.bounds={bounds}: give bounds by table, such as {{C3: 10}}")
        by_table = dict(bounds or {})
        for name, value in {"bound": bound, **{f"bounds.{t}": s for t, s in by_table.items()}}.items():
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
                raise PluginError(
                    f"plugins.het.{name}={value}: give a whole number of updates, at least 0 and below 2^63"
                )
        if cache not in CACHES:
            raise PluginError(f"plugins.het.cache={cache}: choose one of {', '.join(CACHES)}")
        self.bound, self.bounds, self.cache = bound, by_table, cache

    def contribute(self, ctx: Context) -> Contribution:
        """The cache of all tables and the report."""
        for name in self.bounds:
            if name not in ctx.tables:
                raise PluginError(
                    f"plugins.het.bounds.{name}: no such table; there are {', '.join(ctx.tables)}"
                )
        cached = CachedTables(CACHES[self.cache], self.bound, self.bounds)
        return Contribution(
            cache=[cached],
            report=[lambda run: figures(cached.groups)],
        )


class CachedTables(Cache):
    """Builds the tables, each group with its own versions and rounds, and keeps them for the report."""

    def __init__(self, cache: type[CachePolicy], bound: int, bounds: dict[str, int]) -> None:
        self.cache_type, self.bound, self.bounds = cache, bound, bounds
        self.groups: list[HetTables] = []

    def policy(self, space: RowSpace) -> CachePolicy:
        """The policy of a trainer's lines."""
        return self.cache_type(space)

    def collection(self, parts: TierParts) -> TableCollection:
        """A group's tables on this rank; called on every rank, group by group."""
        if parts.device.type != "cpu":
            raise PluginError(
                f"trainer.device={parts.device}: het keeps its caches in host memory; use trainer.device=cpu"
            )
        layout = parts.tables.layout
        updates = np.array([self.bounds.get(name, self.bound) for name in layout.tables], np.int64)
        bounds = Bounds(layout.bases, updates)
        rounds = Rounds(parts.tables, parts.store, parts.ranks, bounds)
        if not parts.ranks.trains:
            assert isinstance(parts.store, HoldersStore), "a rank that only holds rows holds a part"
            return ServedRows(parts.store, rounds)
        space = RowSpace(layout.bases, min(parts.slots, layout.total_rows), parts.group)
        lines = Lines(
            lambda: self.policy(space), bounds, parts.tables.optimizer, parts.tables.dim, layout.width
        )
        self.groups.append(HetTables(parts, rounds, lines))
        return self.groups[-1]


class ServedRows(HeldRows):
    """A rank that holds rows and does not train."""

    def __init__(self, store: HoldersStore, rounds: Rounds) -> None:
        super().__init__(store)
        self.rounds = rounds

    def serve(self) -> None:
        """Apply pushes and answer checks until the trainers are done."""
        self.rounds.serve()
        self.store.close()


def figures(groups: Sequence[HetTables]) -> dict[str, Figure]:
    """What this trainer shipped for all ``groups`` of tables. ``share_saved`` is relative to pulling and
    pushing every distinct row of every batch. All trainers call this."""
    assert groups, "the report comes after the tables were built"
    totals = [tables.settle() for tables in groups]
    traffic = _together([_traffic(tables) for tables in groups])
    moved = traffic["rows_pulled"] + traffic["rows_pushed"]
    return {
        **traffic,
        "share_saved": 1 - moved / max(1, 2 * traffic["version_checks"]),
        **_together([_protocol(*of_group) for of_group in zip(groups, totals, strict=True)]),
    }


def _together(groups: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Sums over the groups, or the maximum of figures that are maxima."""
    return {
        name: (max if name.startswith("largest") else sum)(figures[name] for figures in groups)
        for name in groups[0]
    }


def _traffic(tables: HetTables) -> dict[str, int]:
    shipped = tables.shipped
    return {
        "lookups": shipped.lookups,
        "version_checks": shipped.checks,
        "cache_hits": shipped.hits,
        "rows_pulled": shipped.rows_pulled,
        "rows_pushed": shipped.rows_pushed,
        "bytes_pulled": shipped.rows_pulled * tables.tables.record_bytes,
        "bytes_pushed": shipped.rows_pushed * 4 * tables.tables.dim,
    }


def _protocol(tables: HetTables, totals: Totals) -> dict[str, int]:
    lines = tables.lines
    return {
        "pushes_bound": lines.pushed["bound"],
        "pushes_eviction": lines.pushed["eviction"],
        "pushes_no_line": lines.pushed["no_line"],
        "rows_flushed": lines.pushed["flush"],
        "largest_staleness": totals.largest_staleness,
        "largest_stale_pull": tables.shipped.largest_stale_pull,
        "largest_pending": lines.largest_pending,
        "updates_made": totals.made,
        "updates_applied": totals.applied,
    }
