"""Leaves out samples of a batch, as a skipper decides, before the batch is trained."""

from __future__ import annotations

from typing import Any

import numpy as np

from recpipe.data.select import select
from recpipe.plugin.calls import Owned
from recpipe.plugin.skipper import RowView, Skipper, overrides
from recpipe.tables.skipping import answered


class SampleFilter:
    """Calls a skipper's ``keep`` for each batch; ``RowFilter`` calls its ``update``."""

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
