"""AutoInt: Song et al., 2019, https://arxiv.org/abs/1810.11921."""

from __future__ import annotations

import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.common.validation import Positive
from recpipe.data.schema import Schema
from recpipe.model.config import Dropout, Sizes
from recpipe.models.parts import Fields, SelfAttention, last_layers, outputs_of


class Interacting(nn.Module):
    """One layer: what each field finds in the others by attention, beside a projection of itself."""

    def __init__(self, dim: int, heads: int, width: int) -> None:
        super().__init__()
        self.attention = SelfAttention(dim, heads, width, scale=1.0)
        self.residual = nn.Linear(dim, heads * width, bias=False)

    def forward(self, fields: torch.Tensor) -> torch.Tensor:
        """float32 [B, F, dim] to [B, F, heads * width]."""
        return torch.relu(self.attention(fields) + self.residual(fields))


class AutoInt(nn.Module):
    """Self-attention between fields, in layers; with an MLP beside them it is the paper's AutoInt+."""

    def __init__(
        self,
        schema: Schema,
        embedding_bag_collection: EmbeddingBagCollection,
        embedding_dim: int,
        layers: Positive = 3,
        heads: Positive = 2,
        width: Positive = 16,
        hidden: Sizes | None = None,
        dropout: Dropout = 0.0,
    ) -> None:
        """``width``: of each head's vectors; ``hidden``: the MLP's layers, None: there is none."""
        super().__init__()
        self.fields = Fields(embedding_bag_collection, schema, embedding_dim)
        count = len(self.fields.names)
        dims = [embedding_dim, *[heads * width] * (layers - 1)]
        self.interacting = nn.Sequential(*(Interacting(dim, heads, width) for dim in dims))
        self.top = nn.Linear(count * heads * width, outputs_of(schema))
        self.deep = None
        if hidden is not None:
            self.deep = last_layers(count * embedding_dim, hidden, outputs_of(schema), dropout)

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """Logits float32 [B, L]."""
        fields = self.fields(dense_features, sparse_features)
        logits: torch.Tensor = self.top(self.interacting(fields).flatten(1))
        return logits if self.deep is None else logits + self.deep(fields.flatten(1))
