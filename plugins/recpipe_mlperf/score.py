"""What several runs of a recipe come to, by MLPerf Training's rules: the mean without the fastest and the
slowest run, of which one may not have reached the target."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

from recpipe.report.compared import median_interval
from recpipe_mlperf.clock import Timed

DROPPED = 1
"""Runs that are left out at each end."""
LEAST = 2 * DROPPED + 1
OFFICIAL = 10
"""Runs that MLPerf asks for of a recommender."""


def olympic(values: Sequence[float]) -> float | None:
    """The mean without the smallest and the largest of ``values``; infinity: a run that did not reach the
    target. None if more than one did not, or there are fewer than three."""
    kept = sorted(values)[DROPPED:-DROPPED]
    return fmean(kept) if len(values) >= LEAST and all(map(math.isfinite, kept)) else None


@dataclass(frozen=True)
class Outcome:
    """One run of a row, with the ``seed``; ``report``: its report.json, ``directory`` relative to the
    whole's."""

    seed: int
    timed: Timed
    report: Mapping[str, Any]
    directory: str

    @property
    def converged(self) -> bool:
        """Whether it reached the target."""
        return self.timed.status == "success"

    @property
    def seconds(self) -> float:
        """From the start of the clock to the target; infinite if it was not reached."""
        return self.timed.stop if self.converged else math.inf

    @property
    def samples(self) -> float:
        """Trained until then."""
        return self.timed.samples if self.converged else math.inf

    @property
    def set_up(self) -> float:
        """Seconds from the process's start to the clock's: imports, data, what plugins prepare, tables."""
        first: float = self.report["throughput"]["set_up_seconds"]
        return max(0.0, first - self.timed.first_step)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        evaluating = sum(each.stop - each.start for each in self.timed.evaluations)
        return {
            "seed": self.seed,
            "status": self.timed.status,
            "seconds": self.timed.stop,
            "samples": self.timed.samples,
            "value": self.timed.value,
            "set_up_seconds": self.set_up,
            "evaluation_seconds": evaluating,
            "cpu_seconds": self.timed.cpu_seconds,
            "samples_per_second": self.report["throughput"]["samples_per_second"],
            "evaluations": [asdict(each) for each in self.timed.evaluations],
            "run": self.directory,
        }


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    known = [value for value in values if math.isfinite(value)]
    return {
        "olympic_mean": olympic(values),
        "min": min(known, default=None),
        "max": max(known, default=None),
        "stdev": stdev(known) if len(known) > 1 else None,
    }


def summary(name: str, runs: Sequence[Outcome], first: Sequence[Outcome]) -> dict[str, Any]:
    """A row of time_to_quality.json; its ratios are to the row of the runs ``first``.

    ``*_ratio``: of the olympic means; ``*_ratio_interval``: 95% of the median ratio of runs with the same
    seed that both reached the target, None for the first row and for fewer than three.
    """
    told: dict[str, Any] = {"name": name, "converged": sum(run.converged for run in runs)}
    theirs = {run.seed: run for run in first if run.converged}
    both = [(run, theirs[run.seed]) for run in runs if run.converged and run.seed in theirs]
    for what in ("samples", "seconds"):
        values, others = ([getattr(run, what) for run in each] for each in (runs, first))
        told[what] = _spread(values)
        mean, other = olympic(values), olympic(others)
        told[f"{what}_ratio"] = mean / other if mean is not None and other else None
        pairs = [getattr(mine, what) / getattr(other, what) for mine, other in both]
        interval = None if runs is first else median_interval(pairs)
        told[f"{what}_ratio_interval"] = interval and [*interval]
    speeds = [run.report["throughput"]["samples_per_second"] for run in runs]
    told["samples_per_second"] = fmean(speeds) if speeds else None
    told["set_up_seconds"] = fmean([run.set_up for run in runs]) if runs else None
    told["cpu_seconds"] = fmean([run.timed.cpu_seconds for run in runs]) if runs else None
    told["altered"] = list(runs[0].report.get("altered", ())) if runs else []
    told["runs"] = [run.to_dict() for run in runs]
    return told
