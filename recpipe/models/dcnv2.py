"""DCNv2: Wang et al., 2021, https://arxiv.org/abs/2008.13535."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import nn
from torchrec.modules.crossnet import CrossNet, LowRankCrossNet, LowRankMixtureCrossNet
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.mlp import MLP
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.common.validation import Positive, one_of
from recpipe.data.schema import Schema
from recpipe.model.config import Dropout, Sizes
from recpipe.model.dropout import dropping
from recpipe.models.parts import outputs_of, width_of


def cross_layers(width: int, layers: int, rank: int | None, experts: int) -> nn.Module:
    """TorchRec's cross layers: of whole matrices, of low rank, or a gated mixture of some of low rank."""
    made: nn.Module
    if rank is None:
        made = CrossNet(width, layers)
    elif experts == 1:
        made = LowRankCrossNet(width, layers, rank)
    else:
        made = LowRankMixtureCrossNet(width, layers, experts, rank, torch.tanh)
    return made


class DCNv2(nn.Module):
    """Cross layers over pooled rows and dense features, beside an MLP (``parallel``) or before it
    (``stacked``)."""

    def __init__(
        self,
        schema: Schema,
        embedding_bag_collection: EmbeddingBagCollection,
        num_dense_features: int,
        hidden: Sizes,
        layers: Positive = 3,
        rank: Positive | None = 64,
        experts: Positive = 1,
        structure: Annotated[str, one_of("parallel", "stacked")] = "parallel",
        dropout: Dropout = 0.0,
    ) -> None:
        """``rank``: of the cross layers' matrices; None: whole ones, of which there is one expert."""
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        width = num_dense_features + width_of(embedding_bag_collection)
        self.crosses = cross_layers(width, layers, rank, experts)
        self.deep = dropping(MLP(width, list(hidden)), dropout)
        self.parallel = structure == "parallel"
        self.top = nn.Linear(hidden[-1] + width * self.parallel, outputs_of(schema))

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """Logits float32 [B, L]."""
        pooled = self.embedding_bag_collection(sparse_features).values()
        inputs = torch.cat([dense_features, pooled], dim=1)
        crossed = self.crosses(inputs)
        last = torch.cat([crossed, self.deep(inputs)], dim=1) if self.parallel else self.deep(crossed)
        logits: torch.Tensor = self.top(last)
        return logits
