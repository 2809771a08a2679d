"""Reads batches in advance, for sources that are slow at times."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from recpipe.data.batch import Batch


def read_ahead(batches: Iterator[Batch], depth: int) -> Iterator[Batch]:
    """``batches`` in their order, up to ``depth`` (at least 1) of them read in advance by one thread.

    A fault of the source is raised when its batch would have come. When this iterator is closed or dropped,
    the thread ends after the batch that it is reading.
    """
    reader = ThreadPoolExecutor(1, "recpipe-reader")
    try:
        pending = deque(reader.submit(next, batches, None) for _ in range(depth))
        while (batch := pending.popleft().result()) is not None:
            pending.append(reader.submit(next, batches, None))
            yield batch
    finally:
        reader.shutdown(cancel_futures=True)
