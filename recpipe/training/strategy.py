"""Lightning's strategy for a rank: one device, with callbacks that decide the same on all trainers."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from recpipe.distributed.ranks import Channel


class AgreeingStrategy(SingleDeviceStrategy):
    """Trains on one device. The module exchanges gradients with the other ranks, this class exchanges
    decisions.

    EarlyStopping, ModelCheckpoint and Timer ask their trainer's strategy before they act.
    """

    def __init__(self, device: torch.device, trainers: Channel) -> None:
        super().__init__(device)
        self.trainers = trainers

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all trainers, or any of them, decided so; all of them call it."""
        told = np.concatenate(self.trainers.gather(np.array([decision])))
        return bool(told.all() if all else told.any())

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Trainer ``src``'s ``obj``, which must be possible in JSON; all trainers call it."""
        if self.trainers.size == 1:
            return obj
        own = np.frombuffer(json.dumps(obj).encode(), np.uint8)
        return json.loads(self.trainers.gather(own)[src].tobytes())

    def teardown(self) -> None:
        """End training, and leave model and optimizer state where they are.

        Lightning moves them to the CPU; the trained model is still evaluated and asked for scores, and its
        tables stay on the GPU.
        """
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
