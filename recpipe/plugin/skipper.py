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
    """Leaves out what training does not need. Override ``keep``, ``update`` or both; a method that is not
    overridden costs nothing. A skipper that overrides neither is refused.

    Its plugin must declare that it alters EXACT_GRADIENT and, if it leaves samples out, SAMPLE_SET and
    BATCH_SIZE; core checks this. A skipper has no ``state_dict``: state that a resumed run needs belongs to a
    Lightning callback of the same plugin, which also has its turn between two batches.

    A complete example, which does not update rows with a small gradient::

        class SkipSmall(Skipper):
            def __init__(self, least: float) -> None:
                self.least = least

            def update(self, rows: RowIds, gradients: torch.Tensor) -> torch.Tensor:
                return gradients.norm(dim=1) >= self.least
    """

    def begin(self, view: RowView) -> None:
        """Called once, in the training thread, before the first batch is read and after a resumed run has
        loaded its tables.

        ``view`` shows which rows are resident and how far they move, then and between any two batches. Where
        tables are sharded, no rank could show that: a run with a skipper that overrides this is refused.
        """

    def keep(self, batch: Batch, number: int) -> NDArray[np.bool_] | None:
        """Which samples of ``batch`` to train, bool [B]; None: all.

        ``number``: batches that came before, over all epochs; a resumed run goes on counting. Called in the
        loader's thread, one batch ahead of training, after the ``batch`` chain. Every trainer calls it with
        the same whole batch and must get the same answer. If no sample would be left, the whole batch is
        trained.
        """
        return None

    def update(self, rows: RowIds, gradients: torch.Tensor) -> torch.Tensor | None:
        """Which of distinct ``rows`` (int64 [U], numbered over all tables) to update, bool [U]; None:
        all.

        ``gradients`` float32 [U, D]: the sum of each row's gradients over the batch's lookups on all
        trainers, before the fused optimizer's step; a copy, on the device that trains. The answer may be
        there or in host memory. Rows that are left out keep every bit, optimizer state included.

        Called in the backward pass, in whichever thread makes the update, one call at a time. There may be
        several calls for a group of tables, depending on its tiers and shards. A row of a batch is in one of
        these calls, or in two if the model also looks it up by ids of its own making; then the second answer
        counts. All trainers that hold replicas call it and must get the same answer, so decide from rows,
        gradients and what was decided between two batches, not from the order of the calls.
        """
        return None


def overridden(skipper: Skipper, method: str) -> bool:
    """Whether the class of ``skipper`` overrides ``method``."""
    return getattr(type(skipper), method) is not getattr(Skipper, method)
