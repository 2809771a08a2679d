"""Shows the effect of one rounding: moves each first weight to a neighbouring float32 (``task.nudge``)."""

from __future__ import annotations

from collections.abc import Iterable

import lightning as L
import numpy as np
import torch

from recpipe.plugin.collection import TableCollection


class Nudge(L.Callback):
    """Flips the last bit of every weight of the tables and the dense part before the first step.

    This moves each weight up or down to a neighbouring float32, depending on its bits. It happens after a
    checkpoint or pretrained weights have been loaded; optimizer state does not change.
    """

    def __init__(self, embeddings: TableCollection, dense: Iterable[torch.Tensor]) -> None:
        self.embeddings, self.dense = embeddings, list(dense)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """All ranks call it, each for the regions that it owns."""
        for parameter in self.dense:
            parameter.detach().view(torch.int32).bitwise_xor_(1)
        for region in self.embeddings.regions():
            weights, state = self.embeddings.read(region)
            moved = (np.ascontiguousarray(weights).view(np.int32) ^ 1).view(np.float32)
            self.embeddings.write(region, (moved, state))
