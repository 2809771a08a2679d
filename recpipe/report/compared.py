"""The rows of compare.json: each row's speeds, quality and parameters, beside those of the first row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from recpipe.report.exactness import FACTOR, Difference, limit
from recpipe.report.intervals import mean_interval, median_interval, width
from recpipe.report.merging import merged
from recpipe.report.quality import LABELS, VERDICT

SPEEDS = {
    "all_steps": "samples_per_second",
    "steady": "steady_samples_per_second",
    "end_to_end": "end_to_end_samples_per_second",
}
"""The three speeds of a run and their keys in its report; the first is the main one."""
HEADLINE = "all_steps"
CURVE = 40
"""Points of a row's curves, at most; many rows are drawn into one plot."""


@dataclass
class RowResult:
    """One row so far: the report of its first run, and figures of each run."""

    name: str
    report: Mapping[str, Any] = field(default_factory=dict)
    speeds: dict[str, list[float | None]] = field(default_factory=lambda: {kind: [] for kind in SPEEDS})
    """The speeds of each counted round, by the names of ``SPEEDS``."""
    quality: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """The ``quality`` of the first run with each seed, by the seed's number."""
    others: list[float] = field(default_factory=list)
    """The share of the processors that other programs used in each counted round."""
    difference: Difference | None = None
    """The difference between an exact row's parameters and those of the first exact row."""
    not_comparable: str | None = None
    """Why an exact row has no ``difference``."""
    failed: str | None = None
    """The error of the run after which the row was left out."""
    shown: Mapping[str, Any] = field(default_factory=dict)
    """The report of the first counted run (of the first run, while none is counted), for curves."""
    run: str | None = None
    """The directory of that run, relative to the comparison's."""

    @property
    def altered(self) -> list[str]:
        """The invariants that its plugins alter; empty for an exact row."""
        return list(self.report.get("altered", ()))

    def add(self, report: Mapping[str, Any], seed: int, counted: bool, run: str | None = None) -> None:
        """Add the figures of a run, which is in the directory ``run``."""
        if not self.report:
            self.report = report
        if not self.shown or (counted and not self.speeds[HEADLINE]):
            self.shown, self.run = report, run
        self.quality.setdefault(seed, report.get("quality", {}))
        if counted:
            throughput = report["throughput"]
            for kind, key in SPEEDS.items():
                self.speeds[kind].append(throughput.get(key))
            if throughput.get("others_cpu_share") is not None:
                self.others.append(throughput["others_cpu_share"])

    def ratios(self, first: RowResult, kind: str = HEADLINE) -> list[float]:
        """The ratio of this row's speed to that of ``first``, round by round."""
        pairs = zip(self.speeds[kind], first.speeds[kind], strict=False)
        return [mine / theirs for mine, theirs in pairs if mine is not None and theirs]

    @property
    def memory_bytes(self) -> int | None:
        """Memory of the resident tier and its overhead; None before the first run."""
        memory = self.report.get("memory")
        return memory["resident_bytes"] + memory["tier_overhead_bytes"] if memory else None


def precise(results: Sequence[RowResult], wanted: float) -> bool:
    """Whether the 95% interval of every row's ratio is narrower than ``wanted``, as a share of the ratio."""
    others = [row for row in results[1:] if row.failed is None]
    ratios = [row.ratios(results[0]) for row in others]
    return all(width(median_interval(r), median(r) if r else None) < wanted for r in ratios)


def summarise(results: Sequence[RowResult], rounding: RowResult | None = None) -> list[dict[str, Any]]:
    """The ``rows`` of compare.json, in the requested order; figures of rounds not yet run are None.

    A ratio is the median over rounds of this row's speed divided by the first row's in the same round,
    because other load on the machine slows both. ``*_difference`` is relative to the first row with the same
    seed, for parameters to the first exact row. ``exact_as_declared`` is judged by ``rounding``; it is None
    for a row that does not declare to be exact or has not been judged.
    """
    return [_row(result, results[0], rounding) for result in results]


def _row(result: RowResult, first: RowResult, rounding: RowResult | None) -> dict[str, Any]:
    apart = result.difference
    return {
        "name": result.name,
        **_speed(result, first, HEADLINE),
        **{kind: _speed(result, first, kind) for kind in SPEEDS if kind != HEADLINE},
        **_quality(result, first),
        "seeds": len(result.quality),
        "max_parameter_difference": apart.largest if apart else None,
        "rms_parameter_difference": apart.rms if apart else None,
        "exact_as_declared": _as_declared(result, rounding),
        "not_comparable": result.not_comparable,
        "failed": result.failed,
        "io": dict(result.report.get("io", {})),
        "memory": dict(result.report.get("memory", {})),
        "memory_bytes": result.memory_bytes,
        "cold_start": _cold_start(result.report),
        "verdicts": {
            name: figures[VERDICT]
            for name, figures in result.report.get("plugins", {}).items()
            if figures.get(VERDICT)
        },
        "emulate": result.report.get("ranks", {}).get("emulate"),
        "others_cpu_share": max(result.others, default=None),
        "altered": result.altered,
        "train_samples": result.report.get("data", {}).get("train_samples"),
        "rounds": list(result.speeds[HEADLINE]),
        "run": result.run,
        "history": list(result.shown.get("history", ())),
        "series": merged(result.shown.get("series", {}), CURVE),
    }


def _speed(result: RowResult, first: RowResult, kind: str) -> dict[str, Any]:
    ratios = result.ratios(first, kind)
    return {
        "samples_per_second": _spread([speed for speed in result.speeds[kind] if speed is not None]),
        "ratio": median(ratios) if ratios else None,
        "ratio_spread": _spread(ratios),
        "ratio_interval": None if result is first else median_interval(ratios),
    }


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {"median": None, "min": None, "max": None}
    return {"median": median(values), "min": min(values), "max": max(values)}


def _cold_start(report: Mapping[str, Any]) -> str | None:
    """Why the run only shows how a cache fills; None if it shows more."""
    for name, figures in report.get("plugins", {}).items():
        if figures.get("cold_start"):
            return f"{name}: {figures['cold_start']}"
    return "its cache was never full" if report.get("io", {}).get("cold_start") else None


def _as_declared(result: RowResult, rounding: RowResult | None) -> bool | None:
    if result.not_comparable is not None:
        return False
    return result.difference.within(rounding.difference if rounding else None) if result.difference else None


def _quality(result: RowResult, first: RowResult) -> dict[str, Any]:
    """Means over the seeds, and differences to the first row's with the same seed."""
    found: dict[str, Any] = {}
    for key in LABELS:
        values = [figures[key] for figures in result.quality.values() if figures.get(key) is not None]
        differences = [
            figures[key] - first.quality[seed][key]
            for seed, figures in result.quality.items()
            if seed in first.quality and None not in (figures.get(key), first.quality[seed].get(key))
        ]
        found[key] = fmean(values) if values else None
        found[f"{key}_difference"] = fmean(differences) if differences else None
        found[f"{key}_interval"] = mean_interval(values)
        found[f"{key}_difference_interval"] = None if result is first else mean_interval(differences)
    return found


def rounding(
    results: Sequence[RowResult], base: int | None, rounded: RowResult | None
) -> dict[str, Any] | None:
    """``rounding`` of compare.json: how far the ``base`` row's run is from the same run with each first
    weight moved to a neighbouring float32, and the difference that exact rows may have. None if it was not
    run."""
    if base is None or rounded is None:
        return None
    apart = rounded.difference
    assert apart is not None, "the run has exported its parameters"
    quality = _quality(rounded, results[base])
    return {
        "name": rounded.name,
        **{f"{key}_difference": quality[f"{key}_difference"] for key in LABELS},
        "max_parameter_difference": apart.largest,
        "rms_parameter_difference": apart.rms,
        "factor": FACTOR,
        "allowed_max_parameter_difference": limit(apart.largest),
        "allowed_rms_parameter_difference": limit(apart.rms),
    }
