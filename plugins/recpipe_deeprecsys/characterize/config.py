"""``characterize`` of conf/task/characterize.yaml, typed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Gt, Interval, MinLen

from recpipe.common.validation import FilePath, Positive, Text, one_of

NAME = SECTION = "characterize"
INFERENCE, TRAINING = "inference", "training"


@dataclass(frozen=True)
class CharacterizeConfig:
    """What is characterised, and how closely."""

    source: FilePath | None = None
    """A checkpoint, a run's directory or a package; None: the recipe's own model, with its first weights."""
    mode: Annotated[str, one_of(INFERENCE, TRAINING)] = INFERENCE
    batch_sizes: Annotated[list[Positive], MinLen(1)] | None = None
    """None: ``data.batch_size``."""
    seconds: Annotated[float, Gt(0)] = 2.0
    """For how long steps of each batch size are timed, at least."""
    batches: Annotated[int, Interval(ge=2)] = 100
    """Of ``data.batch_size`` samples, from the start of training: those whose ids are looked at."""
    ids: Annotated[str, one_of("uniform", "skewed")] = "skewed"
    """How the ids are drawn that a package looks up."""
    study: bool = False
    """Whether to study what reduced precision buys on the checkpoint ``source``."""
    recipes: list[Text] = field(default_factory=list)
    """Recipes to set side by side, each as words of the command line; []: the command line's own alone."""
