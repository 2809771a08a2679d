"""What plugins do with training batches between the data and the loader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from recpipe.plugin.api import BatchTransform, EpochOrder, StreamWrapper
from recpipe.plugin.compose import Owned

if TYPE_CHECKING:
    from recpipe.data.batch import Batch


@dataclass(frozen=True)
class Feed:
    """The order of an epoch's samples, and the chains that its batches pass through."""

    order: Owned[EpochOrder] | None = None
    """The plugin's order; None: the data's own."""
    keeps_samples: bool = True
    """Whether ``order`` must have every sample exactly once."""
    stream: Sequence[Owned[StreamWrapper]] = ()
    batch: Sequence[Owned[BatchTransform]] = ()

    @property
    def is_data_itself(self) -> bool:
        """Whether batches reach the loader unchanged."""
        return self.order is None and not self.stream and not self.batch

    def wrap_stream(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Send ``batches`` through the stream chain and return the last link's iterator."""
        for link in self.stream:
            batches = link.part(batches)
        return batches

    def transform(self, batch: Batch) -> Batch:
        """Send one batch through the batch chain."""
        for link in self.batch:
            batch = link.part(batch)
        return batch
