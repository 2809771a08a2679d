"""The keys of ``task=advise``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval, MinLen

from recpipe.common.validation import Count, FilePath, Positive, Text
from recpipe.common.words import Amount
from recpipe.config.task import MOST_RANKS, TaskConfig
from recpipe.distributed.ranks import Emulation


@dataclass(frozen=True)
class AdviseTask(TaskConfig):
    """``task`` of conf/task/advise.yaml; ``batches``: how many to read, from the start of training."""

    batches: Positive = 300


@dataclass(frozen=True)
class AdviseConfig:
    """``advise`` of conf/task/advise.yaml."""

    memory: Annotated[list[int | float | str], MinLen(1)]
    """Memory for table rows, each an amount as ``tiers.resident_bytes``."""
    machine: FilePath | None = None
    """A machine profile to use, also one of another machine; None: this machine's, measured if needed."""
    what_if: dict[Text, Annotated[float, Interval(gt=0, le=1000)]] | None = None
    """For a family of the profile's measurements, how many times as fast it is imagined to be."""
    ranks: Annotated[int, Interval(ge=1, le=MOST_RANKS)] = 1
    """Processes that train together; ``memory`` is that of each."""
    network: Emulation | None = None
    """The network between them, if each is on a machine of its own; None: they share this one."""
    verify: Count = 0
    """How many of the best recipes to run, beside the plain one."""
    steps: Positive | None = None
    """Steps of each of those runs; None: as many as batches were read."""
    repetitions: Positive = 3
    """How often each of them runs."""

    def amounts(self) -> list[Amount]:
        """``memory``, parsed."""
        return [Amount.parsed(text, "advise.memory") for text in self.memory]

    def __post_init__(self) -> None:
        self.amounts()  # refuses what is no amount
