"""HET's figures for the report, and in one sentence whether it paid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from recpipe.plugin import CachePolicy, Figure
from recpipe_het.missed import MissedTotals
from recpipe_het.rounds import Totals
from recpipe_het.tables import HetTables


@dataclass(frozen=True)
class Settings:
    """The knobs, checked."""

    cache: type[CachePolicy]
    bound: int
    bounds: Mapping[str, int]
    updates: str
    measure_staleness: bool


def figures(groups: Sequence[HetTables], settings: Settings) -> dict[str, Figure]:
    """What this trainer shipped for all ``groups`` of tables, and what reads of all trainers missed.
    ``share_saved`` is relative to pulling and pushing every distinct row of every batch. All trainers call
    this."""
    assert groups, "the report comes after the tables were built"
    totals = [tables.settle() for tables in groups]
    traffic = _together([_traffic(tables) for tables in groups])
    moved = traffic["rows_pulled"] + traffic["rows_pushed"]
    shown: dict[str, Figure] = {
        **traffic,
        "share_saved": 1 - moved / max(1, 2 * traffic["version_checks"]),
        **_together([_protocol(*of_group) for of_group in zip(groups, totals, strict=True)]),
    }
    if settings.measure_staleness:
        missed = MissedTotals()
        for of_group in totals:
            missed = missed.plus(of_group.missed)
        reads = max(1, missed.reads)
        shown["largest_missed_updates"] = missed.largest
        shown["mean_missed_updates"] = missed.updates / reads
        shown["reads_missing_share"] = missed.missing / reads
    shown["updates"] = settings.updates
    trainers = len(groups[0].ranks.trainers)
    # A trainer alone sees each of its own updates at once, and ships them one by one.
    exact = trainers == 1 and settings.updates == "each"
    shown["altered"] = "nothing" if exact else "EXACT_GRADIENT"
    return {**shown, "verdict": verdict(shown, trainers)}


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
        "bytes_pushed": shipped.bytes_pushed,
    }


def _protocol(tables: HetTables, totals: Totals) -> dict[str, int]:
    lines = tables.lines
    return {
        "pushes_bound": lines.pushed["bound"],
        "pushes_eviction": lines.pushed["eviction"],
        "pushes_no_line": lines.pushed["no_line"],
        "rows_flushed": lines.pushed["flush"],
        "largest_staleness": totals.largest_staleness,
        "stale_pulls": tables.shipped.stale_pulls,
        "largest_stale_pull": tables.shipped.largest_stale_pull,
        "largest_pending": lines.largest_pending,
        "updates_made": totals.made,
        "updates_applied": totals.applied,
    }


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
