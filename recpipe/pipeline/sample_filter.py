"""Leaves out samples of a batch, as a skipper decides, before the batch is trained."""

from __future__ import annotations

from typing import Any

import numpy as np

from recpipe.data.select import select
from recpipe.plugin.blamed import BlamedSkipper
from recpipe.plugin.calls import Owned
from recpipe.plugin.errors import PluginError
from recpipe.plugin.skipper import RowView
from recpipe.tables.skipping import answered


class SampleFilter:
    """Calls a skipper's ``keep`` for each batch; ``RowFilter`` calls its ``update``."""

    def __init__(self, skipper: Owned[BlamedSkipper], view: RowView) -> None:
        self._skipper, self._view = skipper, view
        self._begun = False
        self._number = 0

    @classmethod
    def of(cls, skipper: Owned[BlamedSkipper] | None, view: RowView) -> SampleFilter | None:
        """The filter of the run's skipper, which gets ``view`` of the rows; None without a skipper."""
        return None if skipper is None else cls(skipper, view)

    @property
    def looks_at_batches(self) -> bool:
        """Whether the skipper looks at batches, not only at rows."""
        return self._skipper.part.keeps

    def begin_epoch(self, number: int) -> None:
        """The next batch has this ``number``, counted over all epochs."""
        self._number = number
        if not self._begun:
            self._skipper.part.begin(self._view)
        self._begun = True

    def kept(self, batch: Any, size: int) -> tuple[Any, int]:
        """``batch``, of so many samples, without those left out, and how many were left out. If no sample
        would be left, all are kept. ``PluginError`` if the answer is not a mask of the samples."""
        number, self._number = self._number, self._number + 1
        kept = self._skipper.part.keep(batch, number) if self.looks_at_batches else None
        if kept is None:
            return batch, 0
        if not isinstance(kept, np.ndarray) or (kept.dtype, kept.shape) != (np.dtype(bool), (size,)):
            raise PluginError(
                f"{self._skipper}: keep() returned {answered(kept)}; it must "
                f"be a numpy array of bool [{size}], one for each sample of the batch, or None"
            )
        samples = np.flatnonzero(kept)
        if len(samples) in (0, size):
            return batch, 0
        return select(batch, samples), size - len(samples)
