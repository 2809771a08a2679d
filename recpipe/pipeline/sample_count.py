"""Counts the samples that pass from the data through the plugins' chains, to find one that loses some."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

from recpipe.data.parts import batch_size
from recpipe.errors import UserError
from recpipe.plugin.batch import Batch
from recpipe.plugin.calls import Owned
from recpipe.plugin.errors import PluginError
from recpipe.plugin.feed import Feed


class SampleCount:
    """The samples of one epoch, counted behind the data and behind each link.

    ``batches``: how many batches the data, or a plugin's order, has to yield in this epoch.
    """

    def __init__(self, feed: Feed, batches: int) -> None:
        self.feed = feed
        self.expected = batches
        self.read = 0
        """Batches that the data has yielded."""
        self.complete = False
        """Whether the chains have said that the epoch has ended."""
        self._counts = [0] * (1 + len(feed.stream) + len(feed.batch))

    def through(self, batches: Iterator[Batch]) -> Generator[Batch]:
        """The data's ``batches`` through the stream chain, all of whose links are counted. When it is closed,
        so is each link's iterator, the last one first."""
        batches = self._data(batches)
        made: list[Iterator[Batch]] = []
        try:
            for number, link in enumerate(self.feed.stream, 1):
                made.append(link.part(batches))
                batches = self._counted(number, link, made[-1])
            yield from batches
            self.complete = True
        finally:
            for each in reversed(made):
                if isinstance(each, Generator):
                    each.close()

    def transformed(self, batch: Batch) -> Batch:
        """``batch`` through the batch chain, all of whose links are counted."""
        for number, link in enumerate(self.feed.batch, 1 + len(self.feed.stream)):
            batch = link.part(batch)
            self._count(number, link, batch)
        return batch

    def _data(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self.read += 1
            if len(self._counts) > 1:
                self._counts[0] += batch_size(batch)
            yield batch

    def _counted(self, number: int, link: Owned[Any], batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self._count(number, link, batch)
            yield batch

    def _count(self, number: int, link: Owned[Any], batch: Batch) -> None:
        try:
            self._counts[number] += batch_size(batch)
        except UserError as fault:
            raise PluginError(f"{link}, made no batch: {fault}") from fault

    def end(self) -> None:
        """The epoch has ended: ``PluginError`` if a plugin has lost or added samples without declaring that
        it does, ``UserError`` if the data has."""
        links: list[Owned[Any]] = [*self.feed.stream, *self.feed.batch]
        for number, link in enumerate(links):
            came, left = self._counts[number : number + 2]
            if came != left and not self._declared(link):
                raise self._wrong(link, f"got {came:,} samples and passed {left:,} on")
        if self.read >= self.expected or any(map(self._declared, links)):
            return
        what = f"{self.read:,} of {self.expected:,} batches were read"
        order = self.feed.order
        if self.feed.stream:
            raise self._wrong(self.feed.stream[0], f"ended the epoch when {what}")
        if order is None:
            raise UserError(f"the data ended an epoch when {what}: its source must yield as many as it says")
        if not self._declared(order):
            raise self._wrong(order, f"ended the epoch when {what}")

    def _declared(self, part: Owned[Any]) -> bool:
        return part.origin.plugin in self.feed.leaving_out

    def _wrong(self, part: Owned[Any], what: str) -> PluginError:
        return PluginError(
            f"{part}, {what}: every epoch trains every sample once; its "
            "author must correct it, or declare Invariant.SAMPLE_SET in alters"
        )
