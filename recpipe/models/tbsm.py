"""TBSM, the time-based sequence model: Ishkhanov et al., 2020, https://arxiv.org/abs/2008.11922."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torchrec.models.dlrm import DenseArch, InteractionArch
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.common.validation import Positive
from recpipe.data.schema import Schema
from recpipe.model.config import Dropout, Sizes
from recpipe.model.dlrm import CPU, ProjectedSparseArch
from recpipe.models.histories import Histories, History, sides_of
from recpipe.models.parts import features_of, glorot, last_layers, outputs_of


class Series(nn.Module):
    """A DLRM's vector of each event and of the target, on the unit sphere, and the time-series layer: the sum
    of the events' vectors, weighted by an MLP over their products <A z_t, A z>, with the target's z."""

    def __init__(self, events: int, dim: int, fields: int, top: Sizes, vector: int, weighting: Sizes) -> None:
        """``fields``: how many vectors of ``dim`` values an event has, the dense one left out."""
        super().__init__()
        self.dim = dim
        self.interaction = InteractionArch(fields)
        # Its last layer is linear: after a ReLU, vectors that differ little may all become 0 and stay so.
        self.top = last_layers(dim + fields * (fields + 1) // 2, top, vector)
        self.inner = nn.Parameter(torch.randn(vector, vector) * vector**-0.5)
        self.weighting = last_layers(events, weighting, events)
        self.width = 2 * vector

    def vectors(self, events: torch.Tensor, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        """float32 [B, N, width] of ``events`` [B, N, E], ``dense`` [B, D] and ``pooled`` [B, F, D]."""
        size, count, _ = events.shape
        sparse = torch.cat(
            [events.view(size, count, -1, self.dim), pooled.unsqueeze(1).expand(-1, count, -1, -1)], dim=2
        )
        repeated = dense.unsqueeze(1).expand(-1, count, -1).flatten(0, 1)
        found = self.top(self.interaction(repeated, sparse.flatten(0, 1)))
        return F.normalize(found, dim=1).view(size, count, -1)

    def forward(self, history: History, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        """The weighted sum beside the target's vector, float32 [B, 2 * width]."""
        both = torch.cat([history.events, history.target.unsqueeze(1)], dim=1)
        found = self.vectors(both, dense, pooled)
        events, target = found[:, :-1] * history.present.unsqueeze(2), found[:, -1]
        near = (events @ self.inner.T * (target @ self.inner.T).unsqueeze(1)).sum(2)
        weights = torch.sigmoid(self.weighting(near))
        return torch.cat([(weights.unsqueeze(2) * events).sum(1), target], dim=1)


class TBSM(nn.Module):
    """An MLP over what the time-series layer makes of the history and its target; everything else of the
    sample is part of each event, as its user is in the paper."""

    def __init__(
        self,
        schema: Schema,
        embedding_bag_collection: EmbeddingBagCollection | None,
        embedding_collection: EmbeddingCollection,
        num_dense_features: int,
        bottom: Sizes,
        top: Sizes,
        vector: Positive,
        weighting: Sizes,
        hidden: Sizes,
        history: Positive | None = None,
        dropout: Dropout = 0.0,
    ) -> None:
        """``bottom`` and ``top``: hidden layers of the DLRM's two MLPs; ``vector``: the width of an event's
        vector; ``weighting``: of the MLP over products; ``hidden``: of the last one."""
        super().__init__()
        sides = sides_of(schema, history, "tbsm")
        self.histories = Histories(embedding_collection, sides)
        dim, bags = embedding_collection.embedding_dim(), embedding_bag_collection
        self.dense_arch = DenseArch(num_dense_features, [*bottom, dim])
        self.sparse_arch = None if bags is None else ProjectedSparseArch(bags, dim, CPU)
        others = 0 if bags is None else len(features_of(bags))
        series = [
            Series(side.length, dim, len(side.sequences) + others, top, vector, weighting) for side in sides
        ]
        self.series = nn.ModuleList(series)
        self.top = last_layers(sum(one.width for one in series), hidden, outputs_of(schema), dropout)
        glorot(self)  # as the authors' layers are about

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """Logits float32 [B, L]."""
        dense = self.dense_arch(dense_features)
        pooled = dense.new_empty(dense.shape[0], 0, dense.shape[1])
        if self.sparse_arch is not None:
            pooled = self.sparse_arch(sparse_features)
        histories = self.histories(sparse_features)
        seen = [one(history, dense, pooled) for one, history in zip(self.series, histories, strict=True)]
        logits: torch.Tensor = self.top(torch.cat(seen, dim=1))
        return logits
