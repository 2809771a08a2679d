"""``conf/task``, typed: what every task has, and what one alone has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Interval, MinLen

from recpipe.validation import Count, FilePath, Positive, Text

MOST_RANKS = 1024
"""Processes that a comparison starts on one machine."""


@dataclass(frozen=True)
class TaskConfig:
    """``conf/task/train.yaml``."""

    name: str
    export_parameters: FilePath | None = None
    nudge: bool = False
    """Whether every first weight is moved to a neighbouring float32."""


@dataclass(frozen=True)
class PlanConfig(TaskConfig):
    """``conf/task/plan.yaml``; ``ranks`` None: those that run."""

    ranks: Positive | None = None


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
