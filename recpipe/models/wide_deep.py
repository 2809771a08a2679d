"""Wide & Deep: Cheng et al., 2016, https://arxiv.org/abs/1606.07792."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import MinLen
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.data.schema import Schema
from recpipe.model.config import Dropout, Sizes
from recpipe.models.parts import LinearPart, features_of, last_layers, outputs_of, require_known, width_of


class WideDeep(nn.Module):
    """A linear model of ids, those of crosses among them, and an MLP over pooled rows and dense features,
    whose outputs are added."""

    def __init__(
        self,
        schema: Schema,
        embedding_bag_collection: EmbeddingBagCollection,
        num_dense_features: int,
        hidden: Sizes,
        wide: Annotated[list[str], MinLen(1)] | None = None,
        dropout: Dropout = 0.0,
    ) -> None:
        """``wide``: features of the linear part; None: all."""
        super().__init__()
        outputs = outputs_of(schema)
        require_known(wide or [], features_of(embedding_bag_collection), "model.wide")
        self.wide = LinearPart(embedding_bag_collection, num_dense_features, outputs, wide)
        self.embedding_bag_collection = embedding_bag_collection
        width = num_dense_features + width_of(embedding_bag_collection)
        self.deep = last_layers(width, hidden, outputs, dropout)

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """Logits float32 [B, L]."""
        pooled = self.embedding_bag_collection(sparse_features).values()
        deep = self.deep(torch.cat([dense_features, pooled], dim=1))
        logits: torch.Tensor = deep + self.wide(dense_features, sparse_features)
        return logits
