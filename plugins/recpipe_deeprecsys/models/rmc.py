"""RMC1 to RMC3: Gupta et al., HPCA 2020, https://arxiv.org/abs/1906.03109."""

from __future__ import annotations

import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.mlp import MLP
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.model.config import Sizes
from recpipe.models.parts import last_layers, width_of


class RMC(nn.Module):
    """An MLP over dense features, whose output and the pooled rows of all tables lie side by side in front of
    another MLP: DLRM with concatenation in place of its dot products."""

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        num_dense_features: int,
        bottom: Sizes,
        top: Sizes,
    ) -> None:
        """``bottom``, ``top``: layers of both MLPs behind their inputs; ``top`` without its one output."""
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        self.bottom = MLP(num_dense_features, list(bottom))
        self.top = last_layers(bottom[-1] + width_of(embedding_bag_collection), top, 1)

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """Logits float32 [B, 1]."""
        pooled = self.embedding_bag_collection(sparse_features).values()
        logits: torch.Tensor = self.top(torch.cat([self.bottom(dense_features), pooled], dim=1))
        return logits
