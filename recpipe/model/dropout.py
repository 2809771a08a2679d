"""Dropout between the layers of TorchRec's MLPs."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.nn import functional as F
from torchrec.modules.mlp import MLP


class DroppingMLP(nn.Module):
    """``mlp`` with ``share`` of the values after each layer set to zero while it is trained; unless ``last``,
    not after the last one. Parameters have the same names."""

    def __init__(self, mlp: MLP, share: float, last: bool = True) -> None:
        super().__init__()
        (layers,) = mlp.children()
        self._mlp = cast("nn.Sequential", layers)
        self.share, self.last = share, last

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """float32 [B, in] to [B, out]."""
        final = len(self._mlp) - 1
        for number, layer in enumerate(self._mlp):
            values = layer(values)
            if number < final or self.last:
                values = F.dropout(values, self.share, self.training)
        return values


def dropping(mlp: MLP, share: float, last: bool = True) -> nn.Module:
    """``mlp`` with dropout after its layers; itself where ``share`` is 0."""
    return DroppingMLP(mlp, share, last) if share else mlp
