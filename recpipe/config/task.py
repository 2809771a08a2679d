"""``conf/task``, typed: the keys of every task, and those of each one."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from annotated_types import Interval, MinLen

from recpipe.common.validation import Count, FilePath, Positive, Text, one_of
from recpipe.tables.tiers.policies import POLICIES
from recpipe.training.config import TrainerConfig

MOST_RANKS = 1024
"""Most processes that a comparison starts on one machine."""


@dataclass(frozen=True)
class TaskConfig:
    """``conf/task/train.yaml``."""

    name: str
    export_parameters: FilePath | None = None
    export_predictions: FilePath | None = None
    """The directory for the predictions and labels of each evaluation."""
    nudge: bool = False
    """Whether to move every first weight to a neighbouring float32."""
    page: bool = True
    """Whether to write report.html."""
    beside: Annotated[str, one_of("auto")] | list[Annotated[str, one_of(*POLICIES)]] | None = None
    """The policies under which the first steps are trained as well, to be shown beside the run."""
    beside_steps: Positive = 40


@dataclass(frozen=True)
class PlanConfig(TaskConfig):
    """``conf/task/plan.yaml``; ``ranks`` None: as many as are running."""

    ranks: Positive | None = None


@dataclass(frozen=True)
class ProfileConfig(TaskConfig):
    """``conf/task/profile.yaml``."""

    warmup: Count = 20
    """Steps before timing begins."""
    steps: Positive = 30
    """Steps timed without the profiler; the same number follows with it."""

    def shortened(self, trainer: TrainerConfig) -> TrainerConfig:
        """``trainer`` reduced to the needed steps, in as many epochs as that takes, without anything else."""
        steps = self.warmup + 2 * self.steps
        only = replace(trainer, checkpoint_every=None, logger=None, callbacks=[])
        return replace(only, max_steps=steps, max_epochs=steps)


@dataclass(frozen=True)
class MissesConfig(TaskConfig):
    """``conf/task/misses.yaml``; ``batches``: how many to read, from the start of training."""

    batches: Positive = 500


@dataclass(frozen=True)
class InstalledTask(TaskConfig):
    """A task that an installed package offers; ``settings``: the keys that recpipe does not know."""

    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CompareConfig:
    """``compare`` of conf/task/compare.yaml: rows, rounds and the processes of each run."""

    plugins: Annotated[list[Text], MinLen(1)]
    repetitions: Positive
    warmup: Count
    ranks: Annotated[int, Interval(ge=1, le=MOST_RANKS)]
    precision: Annotated[float, Interval(gt=0, lt=1)] | None = None
    """Width of the ratios' 95% intervals, as a share of the ratio, that ends the rounds early enough; None:
    there are ``repetitions`` rounds."""
    max_rounds: Positive | None = None
    """Counted rounds at most; None: twice ``repetitions``, or as many as ``minutes`` allows."""
    minutes: Annotated[float, Interval(gt=0)] | None = None
    """How long all of it may take; None: as long as the rounds take."""
    seeds: Positive = 1
    """Over how many seeds, one a round, quality is taken."""
    equal_memory: bool = True
    """Whether a cache policy runs at the memory of each row that takes more than it, too."""

    @property
    def least_rounds(self) -> int:
        """Counted rounds at least: the repetitions, and a round for each seed."""
        return max(self.repetitions, self.seeds - self.warmup)

    @property
    def most_rounds(self) -> int:
        """Counted rounds at most."""
        if self.precision is None:
            return self.least_rounds
        usual = 2 * self.repetitions if self.minutes is None else sys.maxsize
        return max(self.least_rounds, self.max_rounds or usual)
