"""DeepFM: Guo et al., 2017, https://arxiv.org/abs/1703.04247."""

from __future__ import annotations

import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.data.schema import Schema
from recpipe.model.config import Dropout, Sizes
from recpipe.models.parts import Fields, LinearPart, last_layers, outputs_of


def pairwise(fields: torch.Tensor) -> torch.Tensor:
    """The sum of <v_i, v_j> over all pairs of fields, float32 [B, F, D] to [B, 1].

    TorchRec's ``FactorizationMachine`` sums products of single values instead, across dimensions too.
    """
    squares: torch.Tensor = fields.sum(1).square() - fields.square().sum(1)
    return 0.5 * squares.sum(1, keepdim=True)


class DeepFM(nn.Module):
    """A factorization machine, and an MLP over the same vectors, whose outputs are added.

    Several labels share the products of pairs; each has its own linear part and output of the MLP.
    """

    def __init__(
        self,
        schema: Schema,
        embedding_bag_collection: EmbeddingBagCollection,
        embedding_dim: int,
        num_dense_features: int,
        hidden: Sizes,
        dropout: Dropout = 0.0,
    ) -> None:
        super().__init__()
        self.linear = LinearPart(embedding_bag_collection, num_dense_features, outputs_of(schema))
        self.fields = Fields(embedding_bag_collection, schema, embedding_dim)
        width = len(self.fields.names) * embedding_dim
        self.deep = last_layers(width, hidden, outputs_of(schema), dropout)

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """Logits float32 [B, L]."""
        fields = self.fields(dense_features, sparse_features)
        logits: torch.Tensor = self.linear(dense_features, sparse_features) + self.deep(fields.flatten(1))
        return logits + pairwise(fields)
