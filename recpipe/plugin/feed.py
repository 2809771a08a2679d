"""What plugins do with training batches between the data and the loader."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from recpipe.plugin.api import BatchTransform, EpochOrder, StreamWrapper
from recpipe.plugin.calls import Owned


@dataclass(frozen=True)
class Feed:
    """The order of an epoch's samples, and the chains that its batches pass through."""

    order: Owned[EpochOrder] | None = None
    """The plugin's order; None: the data's own."""
    leaving_out: Collection[str] = ()
    """The plugins that declare that they change which samples an epoch trains (SAMPLE_SET)."""
    stream: Sequence[Owned[StreamWrapper]] = ()
    batch: Sequence[Owned[BatchTransform]] = ()

    @property
    def is_data_itself(self) -> bool:
        """Whether batches reach the loader unchanged."""
        return self.order is None and not self.stream and not self.batch
