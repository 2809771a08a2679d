"""MMoE, multi-gate mixture of experts: Ma et al., 2018, https://dl.acm.org/doi/10.1145/3219819.3220007."""

from __future__ import annotations

import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.common.validation import Positive
from recpipe.data.schema import Schema
from recpipe.model.config import Sizes
from recpipe.models.parts import Experts, Gate, glorot, last_layers, outputs_of, width_of


class MMoE(nn.Module):
    """Experts that all labels share, a gate for each label, and a tower over what it mixes."""

    def __init__(
        self,
        schema: Schema,
        embedding_bag_collection: EmbeddingBagCollection,
        num_dense_features: int,
        expert: Sizes,
        tower: Sizes,
        experts: Positive = 4,
    ) -> None:
        """``expert``, ``tower``: layers of each expert, and of each label's MLP."""
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        width, outputs = num_dense_features + width_of(embedding_bag_collection), outputs_of(schema)
        self.experts = Experts(width, experts, expert)
        self.gates = nn.ModuleList(Gate(width, experts) for _ in range(outputs))
        self.towers = nn.ModuleList(glorot(last_layers(expert[-1], tower, 1)) for _ in range(outputs))

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """A logit of each label, float32 [B, L]."""
        pooled = self.embedding_bag_collection(sparse_features).values()
        inputs = torch.cat([dense_features, pooled], dim=1)
        made = self.experts(inputs)
        mixed = [gate(inputs, made) for gate in self.gates]
        return torch.cat([tower(own) for tower, own in zip(self.towers, mixed, strict=True)], dim=1)
