"""``quality`` of conf/task/time_to_quality.yaml, typed: the target, how and in what it is looked for."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Gt, Interval, MinLen

from recpipe.common.validation import Positive, Text, one_of
from recpipe.config.recipe import Seed
from recpipe.config.task import MOST_RANKS
from recpipe.errors import UserError, did_you_mean, shown
from recpipe.model.metrics import LOSS, METRICS, named
from recpipe_mlperf.benchmarks import BENCHMARKS, DIVISIONS, Benchmark

NAME, SECTION = "time_to_quality", "quality"


@dataclass(frozen=True)
class QualityConfig:
    """``quality`` of conf/task/time_to_quality.yaml: the target, how it is looked for, and in which
    recipes."""

    metric: Text = "auc"
    target: float | None = None
    every: Annotated[int | float, Gt(0)] = 0.05
    """From evaluation to evaluation: samples, or a share of the training samples."""
    runs: Positive = 10
    seeds: Annotated[list[Seed], MinLen(1)] | None = None
    """One for each run; None: drawn from the system's entropy."""
    plugins: list[Text] = field(default_factory=list)
    """Rows as ``compare.plugins`` has them; none: the recipe of the command line."""
    ranks: Annotated[int, Interval(ge=1, le=MOST_RANKS)] = 1
    """Processes of each run."""
    benchmark: Annotated[str, one_of(*BENCHMARKS)] | None = None
    """As which of MLPerf's benchmarks runs are logged; None: as none."""
    division: Annotated[str, one_of(*DIVISIONS)] = "closed"
    organisation: Text = "recpipe"
    platform: Text = "one machine"

    @property
    def goal(self) -> float:
        """The target; ``UserError`` without one."""
        if self.target is None or not math.isfinite(self.target):
            raise UserError(
                f"{SECTION}.target is not set: give the {self.metric} at which a run is over "
                f"({SECTION}.target=0.77)"
            )
        return self.target

    @property
    def better(self) -> str:
        """Which way the figure is better, higher or lower; ``UserError`` for a name that is no figure's."""
        name = self.metric.rpartition("/")[2]
        metric = named(name)
        better = "lower" if name == LOSS else metric and metric.better
        if better not in ("higher", "lower"):
            known = [metric.name for metric in METRICS if metric.better != "near 1"]
            what = "has no way that is better" if better else "is unknown"
            raise UserError(
                f"{SECTION}.metric={shown(self.metric)} {what}.{did_you_mean(name, known)} "
                f"Known: {', '.join(known)}, {LOSS}"
            )
        return better

    @property
    def rules(self) -> Benchmark | None:
        """Those of ``benchmark``; None without one."""
        return None if self.benchmark is None else BENCHMARKS[self.benchmark]

    @property
    def share(self) -> float:
        """``every`` as the share of the training samples that a benchmark's rules take; ``UserError`` for a
        number of samples."""
        if not isinstance(self.every, float) or self.every > 1:
            raise UserError(
                f"{SECTION}.every={self.every:g}: the rules of {self.benchmark} take a share of the training "
                "samples, such as 0.05"
            )
        return self.every

    def drawn(self) -> list[int]:
        """A seed for each run; ``UserError`` for one that comes twice."""
        if self.seeds is None:
            drawn: dict[int, None] = {}
            while len(drawn) < self.runs:
                drawn[secrets.randbits(31)] = None
            return [*drawn]
        if len(self.seeds) != len({*self.seeds}):
            twice = next(seed for seed in self.seeds if self.seeds.count(seed) > 1)
            raise UserError(f"{SECTION}.seeds: {twice} comes twice; each run has a seed of its own")
        return list(self.seeds)
