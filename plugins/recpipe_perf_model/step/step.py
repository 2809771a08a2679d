"""A recipe's step, as far as it is known before it runs."""

from __future__ import annotations

from dataclasses import dataclass

from recpipe_perf_model.kernels.models import NO_TIME, Estimate
from recpipe_perf_model.step.capture import Captured


@dataclass(frozen=True)
class Step:
    """A recipe's step, as far as it is known before it runs."""

    captured: Captured
    optimizer: str = "Adagrad"
    """The dense part's, by torch's name."""
    reading: Estimate = NO_TIME
    """How long a batch's reading takes."""
    beside: bool = False
    """Whether tables are updated beside the dense optimizer (``trainer.backend`` other than plain, with
    several threads)."""
    shared: bool | None = None
    """Whether cores share the batch; None: where that is predicted to be so much faster that a run would
    choose it."""
