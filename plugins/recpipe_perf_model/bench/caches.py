"""How fast bytes come from each level of memory: streams over, and random rows of, memory of several sizes.

An operator whose memory is in a cache is not bounded by the memory behind it, so that its roof is higher (the
cache-aware roofline model: Ilic, Pratas, Sousa, IEEE Computer Architecture Letters 13(1), 2014).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial

import torch

from recpipe.common.device import one_thread
from recpipe.profiling.limits import Sample, best_seconds, gathered

FOOTPRINTS = (2**16, 2**18, 2**20, 2**22, 2**24, 2**26, 2**28)
"""Bytes of memory that a stream touches, from a core's own cache to what no cache has."""
TABLES = (2**18, 2**21, 2**24, 2**26, 2**28)
"""Bytes of the tables whose rows are read."""
ROW_BYTES = (16, 64, 256, 1024)
BAG = 64
"""Rows of a bag: so many that little is written beside what is read."""
LEAST_ROWS, LEAST_BYTES = 2**15, 2**23
"""Rows that are read in a call at least, and their bytes, so that the call itself is little of it."""
CPU = torch.device("cpu")


def measure_caches(quick: bool) -> Iterator[Sample]:
    """Samples ``stream`` of each footprint, and ``rows at random`` of each table and size of rows.

    ``amount`` is of bytes read and written. Of several operators, and of one thread and all, the fastest. The
    quick form has fewer sizes of rows.
    """
    for footprint in FOOTPRINTS:
        yield max(streams(footprint), key=rate)
    for footprint in TABLES:
        memory = torch.ones(footprint // 4)
        for row_bytes in ROW_BYTES[1:3] if quick else ROW_BYTES:
            table = memory.view(-1, row_bytes // 4)
            count = max(LEAST_ROWS, LEAST_BYTES // row_bytes) // BAG * BAG
            found = []
            for threads in (nullcontext(), one_thread()):
                with threads:
                    amount, seconds = gathered(table, count, BAG)
                at = {"footprint": float(footprint), "row_bytes": float(row_bytes), "amount": amount}
                found.append(Sample("rows at random", at, seconds))
            yield max(found, key=rate)


def streams(footprint: int) -> Iterator[Sample]:
    """A copy between two halves of so much memory, and a sum, a fill and a change of all of it."""
    whole = torch.ones(footprint // 4)
    source, target = whole.view(2, -1)
    for run, moved in (
        (partial(target.copy_, source), footprint),
        (whole.sum, footprint),
        (whole.zero_, footprint),
        (whole.relu_, 2 * footprint),
    ):
        at = {"footprint": float(footprint), "amount": float(moved)}
        yield Sample("stream", at, best_seconds(run, CPU))


def rate(sample: Sample) -> float:
    """Its bytes per second."""
    return float(sample.at["amount"]) / sample.seconds
