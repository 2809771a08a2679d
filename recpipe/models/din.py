"""DIN: Zhou et al., 2018, https://arxiv.org/abs/1706.06978."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.mlp import MLP
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.common.validation import Positive
from recpipe.data.schema import Schema
from recpipe.model.config import Dropout, Sizes
from recpipe.models.histories import Context, Histories, History, sides_of
from recpipe.models.parts import glorot, last_layers, outputs_of


class Interest(nn.Module):
    """The sum of a history's events, each weighted by how near it is to the target: an MLP over both, their
    difference and their product says so."""

    def __init__(self, width: int, hidden: Sequence[int], softmax: bool) -> None:
        super().__init__()
        self.softmax = softmax
        self.nearness = glorot(
            nn.Sequential(MLP(4 * width, list(hidden), activation=nn.PReLU), nn.Linear(hidden[-1], 1))
        )

    def forward(self, history: History) -> torch.Tensor:
        """float32 [B, E]."""
        events, target = history.events, history.target.unsqueeze(1).expand_as(history.events)
        near = self.nearness(torch.cat([events, target, events - target, events * target], dim=2)).squeeze(2)
        if self.softmax:
            near = near.masked_fill(~history.present, torch.finfo(near.dtype).min).softmax(1)
        near = near.masked_fill(~history.present, 0)
        interest: torch.Tensor = (near.unsqueeze(2) * events).sum(1)
        return interest


class DIN(nn.Module):
    """An MLP over the target, what of the history is near it, and everything else of the sample."""

    def __init__(
        self,
        schema: Schema,
        embedding_bag_collection: EmbeddingBagCollection | None,
        embedding_collection: EmbeddingCollection,
        num_dense_features: int,
        hidden: Sizes,
        attention: Sizes,
        softmax: bool = False,
        history: Positive | None = None,
        dropout: Dropout = 0.0,
    ) -> None:
        """``attention``: the layers of the MLP that weights events; ``softmax``: whether weights add up to 1;
        ``history``: the latest events that are looked at, None: the sequences' ``max_length``."""
        super().__init__()
        self.histories = Histories(embedding_collection, sides_of(schema, history, "din"))
        self.context = Context(embedding_bag_collection, num_dense_features)
        widths = self.histories.widths
        self.interests = nn.ModuleList(Interest(width, attention, softmax) for width in widths)
        known = self.context.width + 2 * sum(widths)
        top = last_layers(known, hidden, outputs_of(schema), dropout)
        self.top = glorot(top, constant=not schema.dense)

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """Logits float32 [B, L]."""
        known = [self.context(dense_features, sparse_features)]
        histories = self.histories(sparse_features)
        for interest, history in zip(self.interests, histories, strict=True):
            known += [history.target, interest(history)]
        logits: torch.Tensor = self.top(torch.cat(known, dim=1))
        return logits
