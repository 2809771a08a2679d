"""MT-WnD, multi-task Wide & Deep: Zhao et al., RecSys 2019, as DeepRecSys has it."""

from __future__ import annotations

import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.mlp import MLP
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.data.schema import Schema
from recpipe.model.config import Sizes
from recpipe.models.parts import last_layers, outputs_of, width_of


class MultiTaskWideDeep(nn.Module):
    """An MLP that all labels share over dense features and pooled rows, and one of each label behind it."""

    def __init__(
        self,
        schema: Schema,
        embedding_bag_collection: EmbeddingBagCollection,
        num_dense_features: int,
        hidden: Sizes,
        tower: Sizes,
    ) -> None:
        """``hidden``: the layers that labels share; ``tower``: those of each label."""
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        self.shared = MLP(num_dense_features + width_of(embedding_bag_collection), list(hidden))
        self.towers = nn.ModuleList(last_layers(hidden[-1], tower, 1) for _ in range(outputs_of(schema)))

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """A logit of each label, float32 [B, L]."""
        pooled = self.embedding_bag_collection(sparse_features).values()
        shared = self.shared(torch.cat([dense_features, pooled], dim=1))
        return torch.cat([tower(shared) for tower in self.towers], dim=1)
