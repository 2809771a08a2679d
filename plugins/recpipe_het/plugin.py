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
    Figure,
    Invariant,
    Plugin,
    PluginError,
    RowSpace,
    RunFigures,
    TableCollection,
    TierParts,
)
from recpipe_het.holder import Bounds, MissedTotals
from recpipe_het.lines import UPDATES, Lines
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
        self.cache, self.updates, self.measure_staleness = cache, updates, measure_staleness
        self.bound, self.bounds = bound, by_table

    def contribute(self, ctx: Context) -> Contribution:
        """The cache of all tables and the report."""
        for name in self.bounds:
            if name not in ctx.tables:
                raise PluginError(
                    f"plugins.het.bounds.{name}: no such table; there are {', '.join(ctx.tables)}"
                )
        cached = CachedTables(self)
        return Contribution(cache=[cached], report=[cached.figures])

    def costs(self, facts: Facts) -> Statement:
        """State what the performance model needs for a prediction without a run."""
        from recpipe_het.costs import statement

        return statement(facts, self.cache, self.bound)


class CachedTables(Cache):
    """Builds the tables, each group with its own versions and rounds, and keeps them for the report."""

    def __init__(self, knobs: HET) -> None:
        self.knobs = knobs
        self.groups: list[HetTables] = []

    def policy(self, space: RowSpace) -> CachePolicy:
        """The policy of a trainer's lines."""
        return CACHES[self.knobs.cache](space)

    def collection(self, parts: TierParts) -> TableCollection:
        """A group's tables on this rank; called on every rank, group by group."""
        if parts.device.type != "cpu":
            raise PluginError(
                f"trainer.device={parts.device}: het keeps its caches in host memory; use trainer.device=cpu"
            )
        if parts.tables.optimizer.average is not None:
            raise PluginError(
                "trainer.ema and trainer.swa: het trains on rows of earlier steps, of which no average over "
                "the steps is exact: leave the key or the plugin out"
            )
        knobs, tables, layout = self.knobs, parts.tables, parts.tables.layout
        updates = [knobs.bounds.get(name, knobs.bound) for name in layout.tables]
        bounds = Bounds(layout.bases, np.array(updates, np.int64))
        rounds = Rounds(tables, parts.store, parts.ranks, bounds, measured=knobs.measure_staleness)
        if not parts.ranks.trains:
            assert isinstance(parts.store, HoldersStore), "a rank that only holds rows holds a part"
            return ServedRows(parts.store, rounds)
        space = RowSpace(layout.bases, min(parts.slots, layout.total_rows), parts.group)
        pending = UPDATES[knobs.updates](space.slots, tables.optimizer, tables.dim, layout.width)
        lines = Lines(lambda: self.policy(space), bounds, pending)
        self.groups.append(HetTables(parts, rounds, lines))
        return self.groups[-1]

    def figures(self, run: RunFigures) -> dict[str, Figure]:
        """What this trainer shipped for all groups of tables, and what reads of all trainers missed.
        ``share_saved`` is relative to pulling and pushing every distinct row of every batch. All trainers
        call this."""
        assert self.groups, "the report comes after the tables were built"
        totals = [tables.settle() for tables in self.groups]
        counted = []
        for tables, total in zip(self.groups, totals, strict=True):
            shipped, lines = tables.shipped, tables.lines
            counted.append(
                {
                    "lookups": shipped.lookups,
                    "version_checks": shipped.checks,
                    "cache_hits": shipped.hits,
                    "rows_pulled": shipped.rows_pulled,
                    "rows_pushed": shipped.rows_pushed,
                    "bytes_pulled": shipped.rows_pulled * tables.tables.record_bytes,
                    "bytes_pushed": shipped.bytes_pushed,
                    "pushes_bound": lines.pushed["bound"],
                    "pushes_eviction": lines.pushed["eviction"],
                    "pushes_no_line": lines.pushed["no_line"],
                    "rows_flushed": lines.pushed["flush"],
                    "largest_staleness": total.largest_staleness,
                    "stale_pulls": shipped.stale_pulls,
                    "largest_stale_pull": shipped.largest_stale_pull,
                    "largest_pending": lines.largest_pending,
                    "updates_made": total.made,
                    "updates_applied": total.applied,
                }
            )
        shown: dict[str, Figure] = {}
        for name in counted[0]:
            over_groups = max if name.startswith("largest") else sum
            shown[name] = over_groups(group[name] for group in counted)
            if name == "bytes_pushed":
                moved = sum(group["rows_pulled"] + group["rows_pushed"] for group in counted)
                checks = sum(group["version_checks"] for group in counted)
                shown["share_saved"] = 1 - moved / max(1, 2 * checks)
        if self.knobs.measure_staleness:
            missed = MissedTotals()
            for total in totals:
                missed = missed.plus(total.missed)
            reads = max(1, missed.reads)
            shown["largest_missed_updates"] = missed.largest
            shown["mean_missed_updates"] = missed.updates / reads
            shown["reads_missing_share"] = missed.missing / reads
        shown["updates"] = self.knobs.updates
        trainers = len(self.groups[0].ranks.trainers)
        # A trainer alone sees each of its own updates at once, and ships them one by one.
        exact = trainers == 1 and self.knobs.updates == "each"
        shown["altered"] = "nothing" if exact else "EXACT_GRADIENT"
        return {**shown, "verdict": verdict(shown, trainers)}


class ServedRows(HeldRows):
    """A rank that holds rows and does not train."""

    def __init__(self, store: HoldersStore, rounds: Rounds) -> None:
        super().__init__(store)
        self.rounds = rounds

    def serve(self) -> None:
        """Apply pushes and answer checks until the trainers are done."""
        self.rounds.serve()
        self.store.close()


def verdict(shown: Mapping[str, Figure], trainers: int) -> str:
    """Whether it paid, and why, in one sentence."""
    saved = shown["share_saved"]
    assert isinstance(saved, float)
    if trainers == 1:
        return (
            f"one trainer, so no row is ever stale: it saved {saved:.0%} of the row transfers, "
            "as any write-back cache does (tiers.policy=lfu), and pays for version checks and pushes besides"
        )
    missed = shown.get("mean_missed_updates")
    if missed == 0:
        return (
            f"no read missed an update, so rows are not shared, or the bound is 0: it saved {saved:.0%} of "
            f"the row transfers, as a write-back cache on each of {trainers} trainers would"
        )
    price = ""
    if isinstance(missed, float):
        share = shown["reads_missing_share"]
        assert isinstance(share, float)
        price = f"; reads missed {missed:.1f} updates on average, {share:.0%} of them at least one"
    return f"the bound saved {saved:.0%} of the row transfers of {trainers} trainers{price}"
