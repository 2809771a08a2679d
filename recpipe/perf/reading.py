"""How long the loader's thread takes to read a batch, measured on the data itself."""

from __future__ import annotations

from statistics import median
from time import perf_counter

import numpy as np

from recpipe.common.threads import one_thread
from recpipe.data.dataset import Dataset
from recpipe.perf.models import NO_TIME, Estimate
from recpipe.tables.inputs import Inputs

BATCHES = 7
"""Batches that are read; the first does not count, since it opens files."""


def reading(dataset: Dataset, size: int, inputs: Inputs) -> Estimate:
    """Seconds of reading a batch, checking its ids and putting them in order."""
    times = []
    with one_thread():
        batches = iter(dataset.batches("train", size))
        for _ in range(BATCHES):
            start = perf_counter()
            batch = next(batches, None)
            if batch is None:
                break
            inputs.require_ids(inputs.each(batch))
            times.append(perf_counter() - start)
    counted = times[1:] or times
    if not counted:
        return NO_TIME
    low, high = np.quantile(counted, (0.1, 0.9))
    return Estimate(median(counted), float(low), float(high))
