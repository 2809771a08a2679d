"""Predicts the time of a recipe's step, and what bounds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp

from recpipe_perf_model.kernels.models import Estimate
from recpipe_perf_model.step.amounts import Amounts, together
from recpipe_perf_model.step.resident import resident_tasks
from recpipe_perf_model.step.step import Step
from recpipe_perf_model.step.walk import Walked, walk

FOUR_FIFTHS = 1.48
"""Standard deviations within which four fifths of measurements lie, if five residuals tell the deviation
(Student's t): the nine probes but for four factors."""


@dataclass(frozen=True)
class Prediction:
    """A step as it is expected to run."""

    step: Estimate
    """Seconds of a step."""
    samples: int
    """Samples of a batch."""
    walked: Walked
    tasks: Mapping[str, Estimate]
    """By name, each task's time on a core of its own."""
    shared: bool
    """Whether cores share the batch."""
    notes: tuple[str, ...] = ()
    """What the prediction is not sure about, in sentences."""

    @property
    def samples_per_second(self) -> float:
        """The speed of training."""
        return self.samples / self.step.seconds


def predict_resident(step: Step, amounts: Amounts) -> Prediction:
    """The plain step, all rows in device memory."""
    tasks, estimates = resident_tasks(step, amounts)
    walked = walk(tasks, amounts.threads)
    seconds = walked.step_seconds
    on_path = together([estimates[name] for name in walked.critical])
    whole = max(on_path.seconds, 1e-12)
    error = FOUR_FIFTHS * amounts.factors.error
    below = max(1 - on_path.low / whole, 1 - exp(-error))
    above = max(on_path.high / whole - 1, exp(error) - 1)
    return Prediction(
        Estimate(seconds, seconds * max(0.0, 1 - below), seconds * (1 + above)),
        step.captured.samples,
        walked,
        estimates,
        "add up gradients" in estimates,
        tuple(_notes(step)),
    )


def _notes(step: Step) -> list[str]:
    captured, found = step.captured, []
    if captured.whole.unknown:
        names = ", ".join(captured.whole.unknown)
        found.append(f"operators without a model of their own count as passes over their bytes: {names}")
    if captured.late:
        found.append(f"{captured.late:,} ids that the model makes itself are not in the time of lookups")
    unused = sum(table.lookups == 0 for group in captured.groups for table in group.tables)
    if unused:
        found.append(f"{unused} tables are not looked up in the batch that was captured")
    return found
