"""HET as a plugin: its own implementation of tables, and figures for the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from recpipe.kit import HeldRows, HoldersStore, Lfu, Lru
from recpipe.plugin import (
    Cache,
    CachePolicy,
    Context,
    Contribution,
    Invariant,
    Plugin,
    PluginError,
    RowSpace,
    TableCollection,
    TierParts,
)
from recpipe_het.bounds import Bounds
from recpipe_het.figures import Settings, figures
from recpipe_het.lines import Lines
from recpipe_het.pending import UPDATES
from recpipe_het.policy import LfuOpt
from recpipe_het.rounds import Rounds
from recpipe_het.tables import HetTables

if TYPE_CHECKING:
    from recpipe_perf_model import Facts, Statement


CACHES: dict[str, type[CachePolicy]] = {"lru": Lru, "lfu": Lfu, "lfuopt": LfuOpt}


class HET(Plugin):
    """Each trainer caches rows, which may lack a bounded number of updates (VLDB'22)."""

    api = (2, 4)
    alters = frozenset({Invariant.EXACT_GRADIENT})

    def __init__(
        self,
        *,
        bound: int,
        bounds: Mapping[str, int] | None,
        cache: str,
        updates: str,
        measure_staleness: bool,
    ) -> None:
        if bounds is not None and not isinstance(bounds, Mapping):
            raise PluginError(f"plugins.het.bounds={bounds}: give bounds by table, such as {{C3: 10}}")
        by_table = dict(bounds or {})
        for name, value in {"bound": bound, **{f"bounds.{t}": s for t, s in by_table.items()}}.items():
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
                raise PluginError(
                    f"plugins.het.{name}={value}: give a whole number of updates, at least 0 and below 2^63"
                )
        for name, word, known in (("cache", cache, [*CACHES]), ("updates", updates, [*UPDATES])):
            if word not in known:
                raise PluginError(f"plugins.het.{name}={word}: choose one of {', '.join(known)}")
        if not isinstance(measure_staleness, bool):
            raise PluginError(f"plugins.het.measure_staleness={measure_staleness}: give true or false")
        self.cache = cache
        self.settings = Settings(
            CACHES[cache], bound, by_table, updates=updates, measure_staleness=measure_staleness
        )

    def contribute(self, ctx: Context) -> Contribution:
        """The cache of all tables and the report."""
        for name in self.settings.bounds:
            if name not in ctx.tables:
                raise PluginError(
                    f"plugins.het.bounds.{name}: no such table; there are {', '.join(ctx.tables)}"
                )
        cached = CachedTables(self.settings)
        return Contribution(
            cache=[cached],
            report=[lambda run: figures(cached.groups, self.settings)],
        )

    def costs(self, facts: Facts) -> Statement:
        """State what the performance model needs for a prediction without a run."""
        from recpipe_het.costs import statement

        return statement(facts, self.cache, self.settings.bound)


class CachedTables(Cache):
    """Builds the tables, each group with its own versions and rounds, and keeps them for the report."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.groups: list[HetTables] = []

    def policy(self, space: RowSpace) -> CachePolicy:
        """The policy of a trainer's lines."""
        return self.settings.cache(space)

    def collection(self, parts: TierParts) -> TableCollection:
        """A group's tables on this rank; called on every rank, group by group."""
        if parts.device.type != "cpu":
            raise PluginError(
                f"trainer.device={parts.device}: het keeps its caches in host memory; use trainer.device=cpu"
            )
        settings, tables, layout = self.settings, parts.tables, parts.tables.layout
        updates = [settings.bounds.get(name, settings.bound) for name in layout.tables]
        bounds = Bounds(layout.bases, np.array(updates, np.int64))
        rounds = Rounds(tables, parts.store, parts.ranks, bounds, measured=settings.measure_staleness)
        if not parts.ranks.trains:
            assert isinstance(parts.store, HoldersStore), "a rank that only holds rows holds a part"
            return ServedRows(parts.store, rounds)
        space = RowSpace(layout.bases, min(parts.slots, layout.total_rows), parts.group)
        pending = UPDATES[settings.updates](space.slots, tables.optimizer, tables.dim, layout.width)
        lines = Lines(lambda: self.policy(space), bounds, pending)
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
