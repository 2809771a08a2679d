"""Skippers: samples left out of a batch, and rows left out of an update."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

    from recpipe.data.batch import Batch
    from recpipe.plugin.policy import RowIds
    from recpipe.tables.view import RowView


class Skipper:
    """Leaves out what training does not need. Its plugin alters EXACT_GRADIENT, and SAMPLE_SET and BATCH_SIZE
    where it leaves samples out. Override ``keep``, ``update`` or both; what is not overridden costs nothing.

    Rows whose gradient is small are not updated, whole::

        class SkipSmall(Skipper):
            def __init__(self, least: float) -> None:
                self.least = least

            def update(self, rows: RowIds, gradients: torch.Tensor) -> torch.Tensor:
                return gradients.norm(dim=1) >= self.least
    """

    def begin(self, view: RowView) -> None:
        """Called once, before the first batch: ``view`` shows which rows are resident and how they move."""

    def keep(self, batch: Batch, number: int) -> NDArray[np.bool_] | None:
        """Which samples of ``batch`` to train, bool [B]; None: all.

        ``number``: batches that came before, over all epochs; a resumed run goes on counting. Called in the
        loader's thread, one batch ahead of training, with the whole batch and the same on every trainer: it
        must decide the same there. A batch of which nothing would be left is trained whole.
        """
        return None

    def update(self, rows: RowIds, gradients: torch.Tensor) -> torch.Tensor | None:
        """Which of distinct ``rows`` (int64 [U], numbered over all tables) to update, bool [U]; None: all.

        ``gradients`` float32 [U, D]: of each row the sum over the batch's lookups, of all trainers, before
        the fused optimizer's step. Rows that are left out keep every bit, optimizer state included. Called in
        the backward pass, one call at a time, for each group of tables and tier; on the rank that makes the
        update.
        """
        return None
