"""How long the loader's thread takes to read a batch, measured on the data itself."""

from __future__ import annotations

from statistics import fmean
from time import perf_counter

import numpy as np

from recpipe.common.device import one_thread
from recpipe.data.dataset import Dataset
from recpipe.tables.inputs import Inputs
from recpipe_perf_model.kernels.models import NO_TIME, Estimate

BATCHES, SECONDS = 65, 1.0
"""Most batches that are read, and most seconds for them; the first does not count, since it opens files. Some
sources read a block of several batches at a time, so that it takes many to know what one costs on average."""
LEAST = 7
"""Batches that are read however long they take."""


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
