"""The rows of compare.json: each row's speeds, quality and parameters, beside those of the first row.

Rows that declare to be exact are judged by comparing their difference with the effect of one rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

import numpy as np

from recpipe.report.figures import BY_LABEL, CLICKS, VERDICT, quality_names, verdict

SPEEDS = {
    "all_steps": "samples_per_second",
    "steady": "steady_samples_per_second",
    "end_to_end": "end_to_end_samples_per_second",
}
"""The three speeds of a run and their keys in its report; the first is the main one."""
HEADLINE = "all_steps"
DIFFERENCES = [f"{kind}_{what}_difference" for what in ("parameter", "prediction") for kind in ("max", "rms")]
"""A row's differences to the base row: the largest over all judged rounds."""
CURVE = 40
"""Points of a row's curves, at most; many rows are drawn into one plot."""
SHOWN = ("step", "steps", "samples", "seconds", "samples_per_second", "loss")
"""What a comparison keeps of the ``series`` of report.json."""
FACTOR = 4.0
"""How many times the effect of one rounding an exact row may differ.

Measured with the default recipe after 5 to 391 steps, and with bags of several ids: rows that add float sums
in another order reach 0.3 to 1.2 times its root mean square and 0.04 to 1.1 times its largest difference. A
learning rate that is off by 0.1% reaches 6 times its root mean square after 391 steps, and 20,000 times after
78.
"""
FLOOR = 2.0**-23
"""The least difference that is always allowed: float32's spacing at 1."""
LEVEL = 0.95
RESAMPLES = 4000
LEAST = 3
"""The least number of rounds or seeds for an interval."""
Interval = tuple[float, float]
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)
"""Student's t at 97.5% for 1 to 14 degrees of freedom."""


@dataclass
class Run:
    """One run of a row, and its ``report``."""

    round: int
    """The number of its round, from 0 on, warm-up included."""
    seed: int
    """The number of its seed, from 0 on."""
    counts: bool
    """Whether it is none of the warm-up."""
    report: Mapping[str, Any]
    directory: str | None = None
    """Relative to the comparison's."""
    apart: Apart | None = None
    """How far it is from the base row's run of the same round, if it must equal that."""

    def speed(self, kind: str) -> float | None:
        """One of its ``SPEEDS``, in samples per second."""
        speed: float | None = self.report["throughput"].get(SPEEDS[kind])
        return speed


@dataclass
class RowResult:
    """One row so far: its runs, and how they were judged."""

    name: str
    runs: list[Run] = field(default_factory=list)
    not_comparable: str | None = None
    """Why an exact row cannot be compared with the base row."""
    evaluation_fault: str | None = None
    """What is wrong with its evaluation, whether the row is exact or not."""
    failed: str | None = None
    """The error of the run after which the row was left out."""

    @property
    def report(self) -> Mapping[str, Any]:
        """The report of its first run; empty before it."""
        return self.runs[0].report if self.runs else {}

    @property
    def shown(self) -> Run | None:
        """The first counted run, for curves; the first run while none is counted."""
        return next((run for run in self.runs if run.counts), self.runs[0] if self.runs else None)

    def ratios(self, first: RowResult, rounds: range, kind: str = HEADLINE) -> list[float]:
        """The ratio of this row's speed to that of ``first`` in each of ``rounds``."""
        theirs = {run.round: run.speed(kind) for run in first.runs}
        pairs = [(run.speed(kind), theirs.get(run.round)) for run in self.runs if run.round in rounds]
        return [mine / other for mine, other in pairs if mine is not None and other]

    def of_seeds(self, finished: int, label: str = "") -> dict[int, Mapping[str, Any]]:
        """The quality, of one of several labels if it is named, of the first run with each seed, of the
        ``finished`` rounds; while there is none, of those that were begun."""
        runs = [run for run in self.runs if run.round < finished] or self.runs
        if label:
            return {run.seed: run.report.get(BY_LABEL, {}).get(label, {}) for run in reversed(runs)}
        return {run.seed: run.report.get("quality", {}) for run in reversed(runs)}

    @property
    def memory_bytes(self) -> int | None:
        """Memory of the resident tier and its overhead; None before the first run."""
        memory = self.report.get("memory")
        return memory["resident_bytes"] + memory["tier_overhead_bytes"] if memory else None


def altered_in(report: Mapping[str, Any]) -> list[str]:
    """The invariants that a run's plugins altered: those that they declare, unless they say in their figures
    that it did not come to that."""
    return list(report.get("altered_in_run", report.get("altered", ())))


def precise(results: Sequence[RowResult], wanted: float, rounds: range) -> bool:
    """Whether the 95% interval of every row's ratio over ``rounds`` is narrower than ``wanted``, as a share
    of the ratio."""
    others = [row for row in results[1:] if row.failed is None]
    ratios = [row.ratios(results[0], rounds) for row in others]
    return all(width(median_interval(r), median(r) if r else None) < wanted for r in ratios)


@dataclass(frozen=True)
class Rounds:
    """The rounds so far: ``warmup`` of them are to be left out, in ``finished`` every row has run."""

    warmup: int
    finished: int

    @property
    def counted(self) -> range:
        """The numbers of the finished ones that count."""
        return range(self.warmup, max(self.warmup, self.finished))

    @property
    def timed(self) -> range:
        """Those whose speeds are shown: the counted ones; while there is none, those of the warm-up."""
        return self.counted or range(self.finished)


def summarise(
    results: Sequence[RowResult], rounds: Rounds, roundings: Mapping[int, RowResult]
) -> list[dict[str, Any]]:
    """The ``rows`` of compare.json, in the requested order.

    Figures are of finished rounds, so that all rows' are of the same ones. A ratio is the median over rounds
    of this row's speed divided by the first row's in the same round, because other load on the machine slows
    both. ``*_difference`` is relative to the first row with the same seed, for parameters and predictions to
    the base row in the same round. ``exact_as_declared`` is judged by the ``roundings``, by seed; it is None
    for a row that need not be exact or has not been judged.
    """
    return [_row(result, results[0], rounds, roundings) for result in results]


def _row(
    result: RowResult, first: RowResult, rounds: Rounds, roundings: Mapping[int, RowResult]
) -> dict[str, Any]:
    report = result.report
    judged: list[dict[str, Any]] = []
    for run in result.runs:
        if run.apart is None:
            continue
        rounded = roundings.get(run.seed)
        rounding = rounded.runs[0].apart if rounded else None
        allowed = _allowed(rounding) if rounding else {}
        judged.append(
            {
                "round": run.round - rounds.warmup + 1,  # 0 or below in the warm-up
                "seed": run.seed,
                **_differences(run.apart),
                **{f"allowed_{key}": value for key, value in allowed.items()},
                "faults": run.apart.faults(rounding),
            }
        )
    timed = [run.report["throughput"] for run in result.runs if run.round in rounds.timed]
    others = [each["others_cpu_share"] for each in timed if each.get("others_cpu_share") is not None]
    altered = {name for run in result.runs for name in altered_in(run.report)}
    shown = result.shown
    return {
        "name": result.name,
        **_speed(result, first, rounds.timed, HEADLINE),
        **{kind: _speed(result, first, rounds.timed, kind) for kind in SPEEDS if kind != HEADLINE},
        **_quality(result, first, rounds.finished),
        BY_LABEL: {name: _quality(result, first, rounds.finished, name) for name in report.get(BY_LABEL, {})},
        "seeds": len(result.of_seeds(rounds.finished)),
        **{name: _largest([each[name] for each in judged]) for name in DIFFERENCES},
        "exact_as_declared": _as_declared(result, bool(altered), [each["faults"] for each in judged]),
        "judged": judged,
        "not_comparable": result.not_comparable,
        "evaluation_fault": result.evaluation_fault,
        "failed": result.failed,
        "io": dict(report.get("io", {})),
        "memory": dict(report.get("memory", {})),
        "memory_bytes": result.memory_bytes,
        "cold_start": _cold_start(report),
        "verdicts": {
            name: figures[VERDICT]
            for name, figures in report.get("plugins", {}).items()
            if figures.get(VERDICT)
        },
        "emulate": report.get("ranks", {}).get("emulate"),
        "others_cpu_share": max(others, default=None),
        "altered": list(report.get("altered", ())),
        "altered_in_run": sorted(altered),
        "train_samples": report.get("data", {}).get("train_samples"),
        "rounds": [run.speed(HEADLINE) for run in result.runs if run.round in rounds.counted],
        "run": shown and shown.directory,
        "history": list(shown.report.get("history", ())) if shown else [],
        "series": merged(shown.report.get("series", {}) if shown else {}, CURVE),
    }


def _speed(result: RowResult, first: RowResult, rounds: range, kind: str) -> dict[str, Any]:
    def spread(values: Sequence[float]) -> dict[str, float | None]:
        middle = median(values) if values else None
        return {"median": middle, "min": min(values, default=None), "max": max(values, default=None)}

    ratios = result.ratios(first, rounds, kind)
    speeds = [run.speed(kind) for run in result.runs if run.round in rounds]
    return {
        "samples_per_second": spread([speed for speed in speeds if speed is not None]),
        "ratio": median(ratios) if ratios else None,
        "ratio_spread": spread(ratios),
        "ratio_interval": None if result is first else median_interval(ratios),
    }


def _cold_start(report: Mapping[str, Any]) -> str | None:
    """Why the run only shows how a cache fills; None if it shows more."""
    for name, figures in report.get("plugins", {}).items():
        if figures.get("cold_start"):
            return f"{name}: {figures['cold_start']}"
    return "its cache was never full" if report.get("io", {}).get("cold_start") else None


def _largest(values: Sequence[float | None]) -> float | None:
    """The largest of those that are known; NaN is larger than all."""
    known = [value for value in values if value is not None]
    return next((value for value in known if math.isnan(value)), max(known, default=None))


def _as_declared(result: RowResult, altered: bool, faults: Sequence[list[str] | None]) -> bool | None:
    """Whether the row is exact; ``faults``: those of each judged run, None where it could not be judged."""
    if altered and not faults:
        return None
    if result.not_comparable is not None or result.evaluation_fault is not None or any(faults):
        return False
    return True if faults and None not in faults else None


def _differences(apart: Apart) -> dict[str, float | None]:
    predictions = apart.predictions
    return {
        "max_parameter_difference": apart.parameters.largest,
        "rms_parameter_difference": apart.parameters.rms,
        "max_prediction_difference": predictions.largest if predictions else None,
        "rms_prediction_difference": predictions.rms if predictions else None,
        "heldout_loss_difference": apart.loss.largest,
    }


def _allowed(rounding: Apart) -> dict[str, float | None]:
    """What ``_differences`` of an exact row may be."""
    predictions = rounding.predictions.allowed() if rounding.predictions else None
    loss = Difference(rounding.allowed_loss)
    return _differences(Apart(rounding.parameters.allowed(), predictions, loss))


def _quality(result: RowResult, first: RowResult, finished: int, label: str = "") -> dict[str, Any]:
    """Means over the seeds, and differences to the first row's with the same seed; of one of several labels
    if it is named."""
    found: dict[str, Any] = {}
    mine, theirs = result.of_seeds(finished, label), first.of_seeds(finished, label)
    for key in quality_names([*mine.values(), *theirs.values()]) or CLICKS:
        values = [figures[key] for figures in mine.values() if figures.get(key) is not None]
        differences = [
            figures[key] - theirs[seed][key]
            for seed, figures in mine.items()
            if seed in theirs and None not in (figures.get(key), theirs[seed].get(key))
        ]
        found[key] = fmean(values) if values else None
        found[f"{key}_difference"] = fmean(differences) if differences else None
        found[f"{key}_interval"] = mean_interval(values)
        apart = found[f"{key}_difference_interval"] = None if result is first else mean_interval(differences)
        others = [figures[key] for figures in theirs.values() if figures.get(key) is not None]
        known = values and others
        found[f"{key}_verdict"] = verdict(key, fmean(values), fmean(others), apart) if known else None
    return found


def rounding(roundings: Mapping[int, RowResult], bases: Mapping[int, RowResult]) -> dict[str, Any] | None:
    """``rounding`` of compare.json: how far the base row's run is from the same run with each first weight
    moved to a neighbouring float32, and the difference that exact rows may have; of the first seed for which
    it was run, and of each other in ``by_seed``. None if it was not run.

    ``bases``: the base row of each seed.
    """
    found = []
    for seed, rounded in sorted(roundings.items()):
        apart = rounded.runs[0].apart
        assert apart is not None, "it was run to be compared"
        quality = _quality(rounded, bases[seed], 0)
        found.append(
            {
                "name": rounded.name,
                "seed": seed,
                **{key: value for key, value in quality.items() if key.endswith("_difference")},
                **_differences(apart),
                "factor": FACTOR,
                **{f"allowed_{key}": value for key, value in _allowed(apart).items()},
            }
        )
    return {**found[0], "by_seed": found} if found else None


def merged(series: Mapping[str, Sequence[Any]], most: int) -> dict[str, list[Any]]:
    """``SHOWN`` of ``series``, with neighbouring intervals made one, so that there are at most ``most``."""
    if not series:
        return {name: [] for name in SHOWN}
    steps = series["steps"]
    each = max(1, -(-len(steps) // most))
    parts = [slice(start, min(start + each, len(steps))) for start in range(0, len(steps), each)]
    # Steps have equally many samples, so that the times of intervals add up and not their speeds.
    paces = [1 / speed if speed else None for speed in series["samples_per_second"]]
    means = [_mean(paces[part], steps[part]) for part in parts]
    return {
        **{name: [series[name][part][-1] for part in parts] for name in ("step", "samples", "seconds")},
        "steps": [sum(steps[part]) for part in parts],
        "samples_per_second": [1 / pace if pace else None for pace in means],
        "loss": [_mean(series["loss"][part], steps[part]) for part in parts],
    }


def _mean(values: Sequence[float | None], steps: Sequence[int]) -> float | None:
    """The mean over all steps of values that are known of some intervals."""
    known = [(value, count) for value, count in zip(values, steps, strict=True) if value is not None]
    total = sum(count for _, count in known)
    return sum(value * count for value, count in known) / total if total else None


@dataclass(frozen=True)
class Difference:
    """The difference between two runs' float32 numbers: their parameters, or their held-out predictions."""

    largest: float = 0.0
    """The largest absolute difference."""
    rms: float = 0.0
    """The root mean square of all differences, where small shifts of many numbers show first."""
    size: float = 1.0
    """The largest absolute value, if that is over 1: differences are rounded in proportion to it."""

    def within(self, rounding: Difference) -> bool:
        """Whether an exact row may differ this much, if one rounding of every first weight makes the
        difference ``rounding``."""
        allowed = rounding.allowed()
        return self.largest <= allowed.largest and self.rms <= allowed.rms

    def allowed(self) -> Difference:
        """What an exact row may differ by, if this is what one rounding does."""
        floor = FLOOR * self.size
        return Difference(max(FACTOR * self.largest, floor), max(FACTOR * self.rms, floor), self.size)


@dataclass(frozen=True)
class Apart:
    """How far an exact row's run is from the base row's run of the same round."""

    parameters: Difference
    """Of tables, optimizer state and dense part together."""
    predictions: Difference | None = None
    """Of the evaluation whose predictions differ most; None if the model has none to score."""
    loss: Difference = Difference()
    """Of the evaluations' losses, which are the model's own and may depend on more than the predictions;
    ``size``: 1 and the loss."""

    @property
    def equal(self) -> bool:
        """Whether nothing differs at all."""
        predictions = self.predictions or Difference()
        return self.parameters.largest == predictions.largest == self.loss.largest == 0

    def faults(self, rounding: Apart | None) -> list[str] | None:
        """What differs more than one rounding explains: ``parameters``, ``predictions``, ``loss``.

        ``rounding`` is what one rounding of every first weight does to the base row. Without it only a run
        that equals the base row's can be judged; otherwise the result is None.
        """
        if self.equal:
            return []
        if rounding is None:
            return None
        found = [] if self.parameters.within(rounding.parameters) else ["parameters"]
        if self.predictions is not None and not self.predictions.within(rounding.predictions or Difference()):
            found.append("predictions")
        return found if self.loss.largest <= rounding.allowed_loss else [*found, "loss"]

    @property
    def allowed_loss(self) -> float:
        """The fair difference of a loss, if this is what one rounding does.

        Fair predictions move a loss, too: by at most their root mean square where it is that of clicks, and
        by at most that times twice the root of the loss where it is a squared error.
        """
        moved = self.parameters if self.predictions is None else self.predictions
        return max(FACTOR * self.loss.largest, moved.allowed().rms * self.loss.size)


def median_interval(values: Sequence[float]) -> Interval | None:
    """Percentile bootstrap (Efron 1979) of the median; None for fewer than ``LEAST`` values.

    The resamples are always the same, so that equal values have equal intervals.
    """
    if len(values) < LEAST:
        return None
    drawn = np.random.default_rng(0).choice(np.asarray(values, np.float64), (RESAMPLES, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), (50 * (1 - LEVEL), 50 * (1 + LEVEL)))
    return float(low), float(high)


def mean_interval(values: Sequence[float]) -> Interval | None:
    """The interval of the mean of independent ``values``; None for fewer than ``LEAST``."""
    if len(values) < LEAST:
        return None
    degrees = len(values) - 1
    t = _T[degrees - 1] if degrees <= len(_T) else 1.96 + 2.5 / degrees  # nearly normal
    half = t * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    mean = float(np.mean(values))
    return mean - half, mean + half


def width(interval: Interval | None, around: float | None) -> float:
    """The interval's width as a share of ``around``; infinite without an interval."""
    return (interval[1] - interval[0]) / around if interval and around else math.inf
