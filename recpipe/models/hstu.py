"""HSTU, hierarchical sequential transduction units: Zhai et al., 2024, https://arxiv.org/abs/2402.17152."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.common.validation import Positive
from recpipe.data.schema import Schema
from recpipe.errors import UserError
from recpipe.model.config import Dropout, Sizes
from recpipe.models.histories import Context, Histories, autoregressive, require_one_history, sides_of
from recpipe.models.parts import Places, last_layers, outputs_of
from recpipe.models.units import Transducer, as_they_are


class HSTU(nn.Module):
    """As a ranker, an MLP over the state of the target after its history and everything else of the sample;
    as a retriever, the sum of the history's last state and an MLP over everything else, and a vector of the
    target."""

    def __init__(
        self,
        schema: Schema,
        embedding_bag_collection: EmbeddingBagCollection | None,
        embedding_collection: EmbeddingCollection,
        num_dense_features: int,
        hidden: Sizes,
        width: Positive = 32,
        units: Positive = 2,
        heads: Positive = 2,
        time_buckets: Positive = 64,
        history: Positive | None = None,
        retrieval: bool = False,
        autoregressive: bool = False,
        activation_checkpointing: bool = False,
        dropout: Dropout = 0.0,
    ) -> None:
        """``time_buckets``: of times between events, where the data have their ages; ``history``: the latest
        events that are looked at, None: the sequences' ``max_length``; ``retrieval``: whether the output is
        two vectors, for a loss over several targets; ``autoregressive``: whether it is trained at every
        position of a history."""
        super().__init__()
        if width % heads:
            raise UserError(f"model.heads={heads} does not divide model.width={width}")
        sides = sides_of(schema, history, "hstu")
        if autoregressive:
            require_one_history(sides, retrieval, "hstu")
        self.autoregressive = autoregressive
        self.histories = Histories(embedding_collection, sides)
        ages = {place for feature in schema.sparse for place in schema.ages_of(feature.name)}
        self.others = Places([place for place in range(num_dense_features) if place not in ages])
        """The columns of dense features that say something else."""
        self.context = Context(embedding_bag_collection, self.others.count)
        self.retrieval = retrieval
        transducers = []
        for side, event in zip(sides, self.histories.widths, strict=True):
            tokens, buckets = side.length + (not retrieval), time_buckets if side.ages else 0
            transducers.append(
                Transducer(
                    tokens, event, width, heads, units, buckets, activation_checkpointing, not retrieval
                )
            )
        self.transducers = nn.ModuleList(transducers)
        outputs = width if retrieval else outputs_of(schema)
        # A retriever's states are the query: an MLP over them would have to find their space again.
        known = 0 if retrieval else width * len(sides)
        self.top = last_layers(self.context.width + known, hidden, outputs, dropout)
        # In the space of the states at first, where events are their rows, too. Without a bias, of which a
        # query's candidates all would have as much.
        target = sum(self.histories.widths)
        self.candidate = as_they_are(nn.Linear(target, width, bias=False)) if retrieval else None

    def forward(
        self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor
    ) -> torch.Tensor | dict[str, Any]:
        """Logits float32 [B, L], or ``query`` and ``candidate`` [B, width]; of each position while it is
        trained at every one."""
        histories = self.histories(sparse_features, dense_features)
        every = self.autoregressive and self.training
        pairs = zip(self.transducers, histories, strict=True)
        states = [transducer(history, not self.retrieval, not every) for transducer, history in pairs]
        context = self.context(self.others(dense_features), sparse_features)
        if self.candidate is None:
            logits: torch.Tensor = self.top(torch.cat([context, *states], dim=1))
            return logits
        if every:
            (one,), (side,), (each,) = histories, self.histories.sides, states
            query, candidate = each + self.top(context).unsqueeze(1), self.candidate(one.following)
            return autoregressive(one, side, sparse_features, query, candidate)
        query = torch.stack([self.top(context), *states]).sum(0)
        target = torch.cat([history.target for history in histories], dim=1)
        return {"query": query, "candidate": self.candidate(target)}
