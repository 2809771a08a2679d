"""The source of an epoch's training batches for the loader."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

from recpipe.data.dataset import Dataset
from recpipe.pipeline.order_check import OrderCheck
from recpipe.pipeline.sample_count import SampleCount
from recpipe.plugin.batch import Batch
from recpipe.plugin.feed import Feed


class BatchSource:
    """The training batches of ``dataset``, with ``batch_size`` samples each, in the order of the plugins'
    ``feed``."""

    def __init__(self, dataset: Dataset, batch_size: int, feed: Feed | None = None) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.feed = feed or Feed()
        if self.feed.order is not None and self.feed.order.part.is_datas_own():
            self.feed = replace(self.feed, order=None)
        self._check = OrderCheck.of(dataset, batch_size, self.feed)
        self._count = SampleCount(self.feed, 0)

    def __len__(self) -> int:
        order = self.feed.order
        return self.dataset.num_batches("train", self.batch_size) if order is None else len(order.part)

    @property
    def ordered_by(self) -> str | None:
        """The plugin that orders the samples; None: the data does."""
        return None if self.feed.order is None else self.feed.order.origin.plugin

    @property
    def gives_parts(self) -> bool:
        """Whether a rank may read its part of each batch alone."""
        return self.dataset.gives_parts and self.feed.is_data_itself

    @contextmanager
    def epoch(self, first: int, part: tuple[int, int] | None = None) -> Iterator[Iterator[Batch]]:
        """In the block, an epoch's batches from number ``first`` on, before ``transform``; reading ends
        with the block. ``part``: the part of each batch, as in ``Dataset.batches``."""
        batches = self._batches(first, part)
        self._count = SampleCount(self.feed, len(self) - first)
        streamed = self._count.through(batches)
        try:
            yield streamed
        finally:
            streamed.close()
            if isinstance(batches, Generator):
                batches.close()

    def transform(self, batch: Batch) -> Batch:
        """Send one batch of the epoch through the plugins' batch chain."""
        return self._count.transformed(batch)

    @property
    def exhausted(self) -> bool:
        """Whether the epoch has no further batch."""
        return self._count.complete

    def end_epoch(self, whole: bool) -> None:
        """End the epoch, of which training has had the ``whole``; may be called again.

        ``PluginError`` if a plugin's order did not have every sample once, or a link lost some.
        """
        if self._check is not None:
            self._check.end()
        if whole or self.exhausted:
            self._count.end()

    def _batches(self, first: int, part: tuple[int, int] | None) -> Iterator[Batch]:
        """The batches in the data's or a plugin's order."""
        if self.feed.order is not None:
            ordered = self.feed.order.part.batches(first)
            return ordered if self._check is None or first else self._check.watched(ordered)
        batches = self.dataset.batches("train", self.batch_size, first, part)
        return read_ahead(batches, self.dataset.read_ahead) if self.dataset.read_ahead else batches


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
