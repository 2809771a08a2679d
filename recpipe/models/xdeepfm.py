"""xDeepFM: Lian et al., 2018, https://arxiv.org/abs/1803.05170."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.data.schema import Schema
from recpipe.model.config import Dropout, Sizes
from recpipe.models.parts import Fields, LinearPart, last_layers, outputs_of


class CompressedInteractionNetwork(nn.Module):
    """Layers of weighted sums of products of vectors, value by value: X^k_h is the sum over i and j of
    W^{k,h}_ij X^{k-1}_i * X^0_j. Of each X^k_h the sum of its values is an output."""

    def __init__(self, fields: int, layers: Sizes) -> None:
        super().__init__()
        before = [fields, *layers[:-1]]
        self.weights = nn.ParameterList(
            torch.randn(width, own, fields) * (own * fields) ** -0.5
            for own, width in zip(before, layers, strict=True)
        )
        self.width = sum(layers)

    def forward(self, fields: torch.Tensor) -> torch.Tensor:
        """float32 [B, F, D] to [B, width]."""
        last = first = fields.transpose(1, 2)  # [B, D, F]
        sums = []
        for weights in self.weights:
            # Sums over j come first: [B, D, H, F'] takes less room than all products.
            mixed = F.linear(first, weights.flatten(0, 1)).view(*first.shape[:2], *weights.shape[:2])
            last = (mixed @ last.unsqueeze(3)).squeeze(3)
            sums.append(last.sum(1))
        return torch.cat(sums, dim=1)


class XDeepFM(nn.Module):
    """A linear part, a compressed interaction network and an MLP over the fields' vectors, whose outputs are
    added."""

    def __init__(
        self,
        schema: Schema,
        embedding_bag_collection: EmbeddingBagCollection,
        embedding_dim: int,
        num_dense_features: int,
        hidden: Sizes,
        layers: Sizes,
        dropout: Dropout = 0.0,
    ) -> None:
        """``layers``: how many vectors each layer of the interaction network makes."""
        super().__init__()
        outputs = outputs_of(schema)
        self.linear = LinearPart(embedding_bag_collection, num_dense_features, outputs)
        self.fields = Fields(embedding_bag_collection, schema, embedding_dim)
        self.interaction = CompressedInteractionNetwork(len(self.fields.names), layers)
        self.top = nn.Linear(self.interaction.width, outputs)
        self.deep = last_layers(len(self.fields.names) * embedding_dim, hidden, outputs, dropout)

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """Logits float32 [B, L]."""
        fields = self.fields(dense_features, sparse_features)
        linear = self.linear(dense_features, sparse_features)
        logits: torch.Tensor = linear + self.top(self.interaction(fields)) + self.deep(fields.flatten(1))
        return logits
