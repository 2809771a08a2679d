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
    """Leaves out what training does not need. Override ``keep``, ``update`` or both; what is not overridden
    costs nothing, and one that overrides neither is refused.

    Its plugin alters EXACT_GRADIENT, and where it leaves samples out also SAMPLE_SET and BATCH_SIZE: core
    refuses one that does not say so. A skipper has no ``state_dict``: state that a resumed run needs belongs
    to a Lightning callback of the same plugin, which also has its turn between two batches.

    Rows whose gradient is small are not updated, whole::

        class SkipSmall(Skipper):
            def __init__(self, least: float) -> None:
                self.least = least

            def update(self, rows: RowIds, gradients: torch.Tensor) -> torch.Tensor:
                return gradients.norm(dim=1) >= self.least
    """

    def begin(self, view: RowView) -> None:
        """Called once, in the training thread, before the first batch is read; a resumed run has loaded its
        tables by then.

        ``view`` shows which rows are resident and how far they move, then and between any two batches. Where
        tables are sharded, no rank could show that: a run with a skipper that overrides this is refused.
        """

    def keep(self, batch: Batch, number: int) -> NDArray[np.bool_] | None:
        """Which samples of ``batch`` to train, bool [B]; None: all.

        ``number``: batches that came before, over all epochs; a resumed run goes on counting. Called in the
        loader's thread, one batch ahead of training, after the ``batch`` chain, with the whole batch and the
        same on every trainer: it must decide the same there. A batch of which nothing would be left is
        trained whole.
        """
        return None

    def update(self, rows: RowIds, gradients: torch.Tensor) -> torch.Tensor | None:
        """Which of distinct ``rows`` (int64 [U], numbered over all tables) to update, bool [U]; None:
        all.

        ``gradients`` float32 [U, D]: of each row the sum over the batch's lookups, of all trainers, before
        the fused optimizer's step; a copy. Rows that are left out keep every bit, optimizer state included.

        Called in the backward pass, in whichever thread makes the update, one call at a time: for each group
        of tables one or several, as its rows lie in tiers and shards. A row of a batch is in one of them; in
        two where the model also looks it up by ids of its own making, the second of which counts. Several
        trainers that hold replicas all ask and must get the same answer: decide from rows, gradients and what
        was decided between two batches, and not from the order of the calls.
        """
        return None


def overridden(skipper: Skipper, method: str) -> bool:
    """Whether ``skipper`` brings ``method`` of its own."""
    return getattr(type(skipper), method) is not getattr(Skipper, method)
