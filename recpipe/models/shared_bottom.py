"""Shared bottom: Caruana, 1997, https://link.springer.com/article/10.1023/A:1007379606734."""

from __future__ import annotations

import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.mlp import MLP
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.data.schema import Schema
from recpipe.model.config import Dropout, Sizes
from recpipe.model.dropout import dropping
from recpipe.models.parts import glorot, last_layers, outputs_of, width_of


class SharedBottom(nn.Module):
    """An MLP that all labels share, and a tower for each label over what it makes."""

    def __init__(
        self,
        schema: Schema,
        embedding_bag_collection: EmbeddingBagCollection,
        num_dense_features: int,
        bottom: Sizes,
        tower: Sizes,
        dropout: Dropout = 0.0,
    ) -> None:
        """``bottom``, ``tower``: layers of the MLP, and of each label's own."""
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        width, outputs = num_dense_features + width_of(embedding_bag_collection), outputs_of(schema)
        self.bottom = dropping(glorot(MLP(width, list(bottom))), dropout)
        towers = (last_layers(bottom[-1], tower, 1, dropout) for _ in range(outputs))
        self.towers = nn.ModuleList(glorot(own) for own in towers)

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """A logit of each label, float32 [B, L]."""
        pooled = self.embedding_bag_collection(sparse_features).values()
        shared = self.bottom(torch.cat([dense_features, pooled], dim=1))
        return torch.cat([tower(shared) for tower in self.towers], dim=1)
