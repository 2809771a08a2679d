"""Two towers for retrieval: Yi et al., 2019, https://doi.org/10.1145/3298689.3346996."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.mlp import MLP
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.data.schema import Schema
from recpipe.errors import UserError
from recpipe.model.config import Sizes
from recpipe.models.parts import Places, candidates_of, features_of, glorot, outputs_of


class Tower(nn.Module):
    """A vector of some features: their pooled rows and dense values side by side, and an MLP whose last layer
    is linear."""

    def __init__(
        self, sparse: Sequence[str], dense: Sequence[int], width: int, layers: Sequence[int]
    ) -> None:
        """``dense``: the columns of the dense features; ``width``: of the pooled rows side by side."""
        super().__init__()
        self.sparse, self.dense = list(sparse), Places(dense)
        *hidden, last = layers
        wide = width + self.dense.count
        first = [MLP(wide, hidden)] if hidden else []
        self.layers = glorot(nn.Sequential(*first, nn.Linear(hidden[-1] if hidden else wide, last)))

    def forward(self, dense_features: torch.Tensor, pooled: dict[str, torch.Tensor]) -> torch.Tensor:
        """float32 [B, last]."""
        parts = [pooled[name] for name in self.sparse]
        if self.dense.count:
            parts.append(self.dense(dense_features))
        vectors: torch.Tensor = self.layers(torch.cat(parts, dim=1))
        return vectors


class TwoTower(nn.Module):
    """A vector of the query (user and context) and one of the candidate (item), each of its own features, so
    that candidates can be looked for by the product of both."""

    def __init__(
        self,
        schema: Schema,
        embedding_bag_collection: EmbeddingBagCollection,
        candidate: Sequence[str],
        query_layers: Sizes,
        candidate_layers: Sizes,
        normalize: bool = False,
        retrieval: bool = True,
    ) -> None:
        """``candidate``: its features, sparse and dense; (): those whose side is the item in the data's
        schema. All others are the query's. ``normalize``: whether both vectors have length 1. ``retrieval``:
        whether the output is both vectors, for a loss over several candidates; otherwise it is the logit of a
        click."""
        super().__init__()
        self.embedding_bag_collection, self.normalize = embedding_bag_collection, normalize
        self.retrieval = retrieval
        sparse = features_of(embedding_bag_collection)
        candidate = candidates_of(schema, candidate, [*sparse, *schema.dense])
        if query_layers[-1] != candidate_layers[-1]:
            raise UserError(
                f"model.query_layers ends in {query_layers[-1]} and model.candidate_layers in "
                f"{candidate_layers[-1]}: vectors that are multiplied need the same width"
            )
        if outputs_of(schema) > 1 and not retrieval:
            raise UserError("model.retrieval=false has one output, and the data have several labels")
        widths = {
            name: config.embedding_dim
            for config in embedding_bag_collection.embedding_bag_configs()
            for name in config.feature_names
        }

        def tower(own: bool, layers: Sequence[int]) -> Tower:
            names = [name for name in sparse if (name in candidate) == own]
            dense = [n for n, name in enumerate(schema.dense) if (name in candidate) == own]
            if not names and not dense:
                which = "candidate" if own else "query"
                raise UserError(
                    f"model=two_tower: the {which} is left without a feature; model.candidate, or side: item "
                    "in data.features, says which are the candidate's: some, not all"
                )
            return Tower(names, dense, sum(widths[name] for name in names), layers)

        self.query, self.candidate = tower(False, query_layers), tower(True, candidate_layers)

    def forward(
        self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """``query`` and ``candidate`` float32 [B, D], or logits [B, 1]."""
        pooled = self.embedding_bag_collection(sparse_features).to_dict()
        query, candidate = self.query(dense_features, pooled), self.candidate(dense_features, pooled)
        if self.normalize:
            query, candidate = F.normalize(query, dim=1), F.normalize(candidate, dim=1)
        if self.retrieval:
            return {"query": query, "candidate": candidate}
        logits: torch.Tensor = (query * candidate).sum(1, keepdim=True)
        return logits
