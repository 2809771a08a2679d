"""Checks that a plugin's order of an epoch has every sample of the data exactly once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from recpipe.data.content import sample_hashes
from recpipe.data.dataset import Dataset
from recpipe.data.parts import batch_size
from recpipe.plugin.api import EpochOrder
from recpipe.plugin.errors import PluginError
from recpipe.plugin.feed import Feed

_WHOLE = 2**64
_contents: dict[str, int] = {}
"""The sum of the training samples' hashes, by the data's fingerprint."""


class OrderCheck:
    """Adds up what an ``EpochOrder`` hands out, and compares it with the data at the epoch's end.

    Samples are compared by content, which costs one pass over the data per process. It does not check an
    epoch that a resumed run began in the middle, an epoch that ended early, and data that may be different
    when read again (``Dataset.rereads``).
    """

    def __init__(self, dataset: Dataset, size: int, plugin: str, order: EpochOrder) -> None:
        self.dataset, self.size, self.plugin, self.order = dataset, size, plugin, order
        self.batches = self.samples = self.content = 0
        self._ended = self._judged = False

    @classmethod
    def of(cls, dataset: Dataset, batch_size: int, feed: Feed) -> OrderCheck | None:
        """The check of the order of ``feed``; None if there is no order, or if its plugin declares that it
        changes the set."""
        if feed.order is None or feed.order.origin.plugin in feed.leaving_out or not dataset.rereads:
            return None
        return cls(dataset, batch_size, feed.order.origin.plugin, feed.order.part)

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
        expected, there = len(self.order), self.dataset.size("train")
        if self._judged or not (self._ended or self.batches == expected):
            return
        self._judged = True
        if self.batches != expected:
            raise self._wrong(f"yielded {self.batches:,} batches, and its length is {expected:,}")
        if self.samples != there:
            raise self._wrong(f"yielded {self.samples:,} samples of the data's {there:,}")
        if self.content != self._content():
            raise self._wrong(
                f"yielded {self.samples:,} samples, as many as the data has, but some are left out, repeated "
                "or changed"
            )

    def _content(self) -> int:
        key = f"{self.dataset.fingerprint} {self.dataset.size('train')}"
        if key not in _contents:
            batches = self.dataset.batches("train", self.size)
            _contents[key] = sum(int(sample_hashes(batch).sum()) for batch in batches) % _WHOLE
        return _contents[key]

    def _wrong(self, what: str) -> PluginError:
        return PluginError(
            f"plugin '{self.plugin}': an epoch must hold every sample once, and its order {what}: its author "
            "must correct it, or declare Invariant.SAMPLE_SET in alters"
        )
