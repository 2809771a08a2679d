"""``lambda`` of conf/task/lambda.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Interval, MinLen

from recpipe.common.validation import FilePath, Positive, one_of
from recpipe.tables.stores import KINDS
from recpipe_lambda_learner.effects import EffectConfig
from recpipe_lambda_learner.posterior import Learning, Precision
from recpipe_lambda_learner.rows import Keeping


@dataclass(frozen=True)
class PublishConfig:
    """``lambda.publish``."""

    dir: FilePath | None = None
    """Where deltas are written; None: none are."""
    base: FilePath | None = None
    """The package that the chain begins with; None: ``base.recpipe`` in ``dir``, which is made if it is not
    there."""
    every: Positive = 10
    """Mini-batches from one delta to the next."""
    sign: FilePath | None = None
    """A private Ed25519 key, as a PEM file."""


@dataclass(frozen=True)
class LambdaConfig:
    """``lambda`` of conf/task/lambda.yaml."""

    checkpoint: FilePath | None
    resume: FilePath | None
    effects: Annotated[list[EffectConfig], MinLen(1)]
    batch_size: Positive
    ridge: Annotated[float, Interval(ge=0)]
    keep: Annotated[float, Interval(ge=0, le=1)]
    precision: Annotated[str, one_of("full", "diagonal", "identity")]
    entities: Positive
    store: Annotated[str, one_of(*KINDS)]
    dir: FilePath | None
    save_every: Positive | None
    publish: PublishConfig
    retrain_every: Positive | None
    windows: Positive
    save_scores: bool

    @property
    def learning(self) -> Learning:
        """How effects learn."""
        kept: Precision = self.precision  # type: ignore[assignment]
        return Learning(self.ridge, self.keep, kept)

    def keeping(self, place: Path) -> Keeping:
        """Where coefficients are kept; ``place``: unless ``dir`` says another directory."""
        return Keeping(self.entities, self.store, place if self.dir is None else Path(self.dir) / place.name)
