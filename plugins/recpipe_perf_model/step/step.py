"""A recipe's step, as far as it is known before it runs, and how long its reading takes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from statistics import fmean
from time import perf_counter

import numpy as np

from recpipe.common.device import one_thread
from recpipe.common.saved import parse_json, typed_as
from recpipe.data.dataset import Dataset
from recpipe.tables.inputs import Inputs
from recpipe_perf_model.kernels.models import NO_TIME, Estimate
from recpipe_perf_model.step.capture import Captured

BATCHES, SECONDS = 65, 1.0
"""Most batches that are read, and most seconds for them; the first does not count, since it opens files. Some
sources read a block of several batches at a time, so that it takes many to know what one costs on average."""
LEAST = 7
"""Batches that are read however long they take."""


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


def step_text(step: Step) -> str:
    """``step`` as JSON, as a machine's profile keeps it."""
    return json.dumps(asdict(step), separators=(",", ":"))


def parse_step(text: str) -> Step:
    """The step of such a text; ``Damaged`` if it is none."""
    return typed_as(Step, parse_json(text))


def reading(dataset: Dataset, size: int, inputs: Inputs) -> Estimate:
    """Seconds of reading a batch, checking its ids and putting them in order."""
    times: list[float] = []
    with one_thread():
        batches = iter(dataset.batches("train", size))
        while len(times) < (BATCHES if sum(times) < SECONDS else LEAST):
            start = perf_counter()
            batch = next(batches, None)
            if batch is None:
                break
            inputs.require_ids(inputs.each(batch))
            times.append(perf_counter() - start)
    counted = times[1:] or times
    if not counted:
        return NO_TIME
    mean = fmean(counted)
    error = float(np.std(counted)) / len(counted) ** 0.5
    return Estimate(mean, max(0.0, mean - error), mean + error)
