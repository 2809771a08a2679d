"""The source of an epoch's training batches for the loader: the data's or a plugin's order, the plugins'
chains, and the checks that each sample of the data comes once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from recpipe.data.content import sample_hashes
from recpipe.data.dataset import Dataset
from recpipe.data.parts import batch_size
from recpipe.data.select import select
from recpipe.errors import UserError
from recpipe.plugin.api import EpochOrder
from recpipe.plugin.batch import Batch
from recpipe.plugin.calls import Owned
from recpipe.plugin.compose import Feed
from recpipe.plugin.errors import PluginError
from recpipe.plugin.skipper import RowView, Skipper, overrides
from recpipe.tables.skipping import answered

_WHOLE = 2**64
_contents: dict[str, int] = {}
"""The sum of the training samples' hashes, by the data's fingerprint."""


class BatchSource:
    """The training batches of ``dataset``, with ``batch_size`` samples each, in the order of the plugins'
    ``feed``. The samples of an epoch are counted behind the data and behind each link of the chains, to find
    one that loses some."""

    def __init__(self, dataset: Dataset, batch_size: int, feed: Feed | None = None) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        feed = feed or Feed()
        if feed.order is not None and feed.order.part.is_datas_own():
            feed = replace(feed, order=None)
        if dataset.endless and (feed.order is not None or feed.stream):
            raise UserError(
                f"{feed.order or feed.stream[0]}, puts batches in another order, and those of a stream are "
                "trained as they come: leave the plugin out"
            )
        self.feed = feed
        self.ordered_by = None if feed.order is None else feed.order.origin.plugin
        """The plugin that orders the samples; None: the data does."""
        names = [link.origin.plugin for link in feed.stream]
        self.takes_rows = next((n for n, name in enumerate(names) if name in feed.taking_rows), None)
        """The number of the first link of the stream chain that takes rows in the place of keys."""
        self.gives_parts = dataset.gives_parts and feed.is_data_itself
        """Whether a rank may read its part of each batch alone."""
        self.exhausted = False
        """Whether the chains have said that the epoch has ended."""
        self._check: _OrderCheck | None = None
        if feed.order is not None and dataset.rereads and self.ordered_by not in feed.leaving_out:
            self._check = _OrderCheck(dataset, batch_size, feed.order)
        self._links: list[Owned[Any]] = [*feed.stream, *feed.batch]
        self._read = self._expected = 0
        """Batches of the epoch that the data, or a plugin's order, has yielded and has to yield."""
        self._counts = [0] * (1 + len(self._links))
        """Samples of the epoch behind the data and behind each link."""

    def __len__(self) -> int:
        order = self.feed.order
        return self.dataset.num_batches("train", self.batch_size) if order is None else len(order.part)

    @contextmanager
    def epoch(
        self,
        first: int,
        part: tuple[int, int] | None = None,
        number: int = 0,
        with_rows: Callable[[Batch], Batch] | None = None,
    ) -> Iterator[Iterator[Batch]]:
        """In the block, the batches of epoch ``number`` from number ``first`` on, before ``transform``;
        reading ends with the block. ``part``: the part of each batch, as in ``Dataset.batches``.
        ``with_rows``: puts rows in the place of keys for the link ``takes_rows``, and those after it."""
        if self.feed.order is not None:
            batches = self.feed.order.part.batches(first)
            if self._check is not None and not first:
                batches = self._check.watched(batches)
        else:
            batches = self.dataset.of_epoch(number).batches("train", self.batch_size, first, part)
            if self.dataset.read_ahead:
                batches = read_ahead(batches, self.dataset.read_ahead)
        self._read, self._expected, self.exhausted = 0, len(self) - first, False
        self._counts = [0] * (1 + len(self._links))
        linked = self._linked(len(self.feed.stream), batches, with_rows)
        try:
            yield linked
        finally:
            linked.close()

    def _linked(
        self, number: int, batches: Iterator[Batch], with_rows: Callable[[Batch], Batch] | None
    ) -> Generator[Batch]:
        """The data's ``batches`` through the first ``number`` links of the stream chain, counted. When it is
        closed, so is each link's iterator, the last one first."""
        made = batches
        if number:
            batches = self._linked(number - 1, batches, with_rows)
            given: Iterator[Batch] = batches
            if with_rows is not None and number - 1 == self.takes_rows:
                given = map(with_rows, batches)
            made = self.feed.stream[number - 1].part(given)
        try:
            for batch in made:
                if number:
                    self._count(number, batch)
                else:
                    self._read += 1
                    if self._links:
                        self._counts[0] += batch_size(batch)
                yield batch
            if number == len(self.feed.stream):
                self.exhausted = True
        finally:
            for each in (made, batches):
                if isinstance(each, Generator):
                    each.close()

    def transform(self, batch: Batch) -> Batch:
        """Send one batch of the epoch through the plugins' batch chain."""
        for number, link in enumerate(self.feed.batch, 1 + len(self.feed.stream)):
            batch = link.part(batch)
            self._count(number, batch)
        return batch

    def _count(self, number: int, batch: Batch) -> None:
        try:
            self._counts[number] += batch_size(batch)
        except UserError as fault:
            raise PluginError(f"{self._links[number - 1]}, made no batch: {fault}") from fault

    def end_epoch(self, whole: bool) -> None:
        """End the epoch, of which training has had the ``whole``; may be called again.

        ``PluginError`` if a plugin has lost or added samples without declaring that it does, or its order did
        not have every sample once; ``UserError`` if the data has lost some.
        """
        if self._check is not None:
            self._check.end()
        if not whole and not self.exhausted:
            return
        declares = [link.origin.plugin in self.feed.leaving_out for link in self._links]
        for number, link in enumerate(self._links):
            came, left = self._counts[number : number + 2]
            if came != left and not declares[number]:
                raise _loses(link, f"got {came:,} samples and passed {left:,} on")
        if self._read >= self._expected or any(declares) or self.dataset.endless:
            return
        what = f"{self._read:,} of {self._expected:,} batches were read"
        order = self.feed.order
        if self.feed.stream:
            raise _loses(self.feed.stream[0], f"ended the epoch when {what}")
        if order is None:
            raise UserError(f"the data ended an epoch when {what}: its source must yield as many as it says")
        if order.origin.plugin not in self.feed.leaving_out:
            raise _loses(order, f"ended the epoch when {what}")


def _loses(part: Owned[Any], what: str) -> PluginError:
    return PluginError(
        f"{part}, {what}: every epoch trains every sample once; its "
        "author must correct it, or declare Invariant.SAMPLE_SET in alters"
    )


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


class _OrderCheck:
    """Adds up what an ``EpochOrder`` hands out, and compares it with the data at the epoch's end.

    Samples are compared by content, which costs one pass over the data per process. It does not check an
    epoch that a resumed run began in the middle, an epoch that ended early, and data that may be different
    when read again (``Dataset.rereads``).
    """

    def __init__(self, dataset: Dataset, size: int, order: Owned[EpochOrder]) -> None:
        self.dataset, self.size, self.order = dataset, size, order
        self.batches = self.samples = self.content = 0
        self._ended = self._judged = False

    def watched(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Pass on the ``batches`` of an epoch, from its first one on, and count their samples."""
        self.batches = self.samples = self.content = 0
        self._ended = self._judged = False
        for batch in batches:
            self.batches += 1
            self.samples += batch_size(batch)
            self.content = (self.content + int(sample_hashes(batch).sum())) % _WHOLE
            yield batch
        self._ended = True

    def end(self) -> None:
        """End the epoch; ``PluginError`` if it did not have every sample once."""
        expected, there = len(self.order.part), self.dataset.size("train")
        if self._judged or not (self._ended or self.batches == expected):
            return
        self._judged, wrong = True, ""
        if self.batches != expected:
            wrong = f"yielded {self.batches:,} batches, and its length is {expected:,}"
        elif self.samples != there:
            wrong = f"yielded {self.samples:,} samples of the data's {there:,}"
        else:
            key = f"{self.dataset.fingerprint} {there}"
            if key not in _contents:
                read = self.dataset.batches("train", self.size)
                _contents[key] = sum(int(sample_hashes(batch).sum()) for batch in read) % _WHOLE
            if self.content != _contents[key]:
                wrong = (
                    f"yielded {self.samples:,} samples, as many as the data has, but some are left out, "
                    "repeated or changed"
                )
        if wrong:
            raise PluginError(
                f"plugin '{self.order.origin.plugin}': an epoch must hold every sample once, and its order "
                f"{wrong}: its author must correct it, or declare Invariant.SAMPLE_SET in alters"
            )


class SampleFilter:
    """Leaves out samples of a batch as a skipper's ``keep`` decides, before the batch is trained.
    ``RowFilter`` calls its ``update``."""

    def __init__(self, skipper: Owned[Skipper], view: RowView) -> None:
        self._skipper, self._view = skipper, view
        self.looks_at_batches = overrides(skipper.part, Skipper.keep)
        """Whether the skipper looks at batches, not only at rows."""
        self._begun = False
        self._number = 0

    @classmethod
    def of(cls, skipper: Owned[Skipper] | None, view: RowView) -> SampleFilter | None:
        """The filter of the run's skipper, which gets ``view`` of the rows; None without a skipper."""
        return None if skipper is None else cls(skipper, view)

    def begin_epoch(self, number: int) -> None:
        """The next batch has this ``number``, counted over all epochs."""
        self._number = number
        if not self._begun:
            self._skipper.call(Skipper.begin, self._view)
        self._begun = True

    def kept(self, batch: Any, size: int) -> tuple[Any, int]:
        """``batch``, of so many samples, without those left out, and how many were left out. If no sample
        would be left, all are kept. ``PluginError`` if the answer is not a mask of the samples."""
        number, self._number = self._number, self._number + 1
        if not self.looks_at_batches:
            return batch, 0

        def wrong(kept: object) -> str | None:
            mask = isinstance(kept, np.ndarray) and (kept.dtype, kept.shape) == (np.dtype(bool), (size,))
            if mask or kept is None:
                return None
            return (
                f": keep() returned {answered(kept)}; it must be a numpy array of bool [{size}], one for "
                "each sample of the batch, or None"
            )

        kept = self._skipper.call(Skipper.keep, batch, number, wrong=wrong)
        if kept is None:
            return batch, 0
        samples = np.flatnonzero(kept)
        if len(samples) in (0, size):
            return batch, 0
        return select(batch, samples), size - len(samples)
