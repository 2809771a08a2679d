"""SASRec: Kang and McAuley, 2018, https://arxiv.org/abs/1808.09781."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.common.validation import Positive
from recpipe.data.schema import Schema
from recpipe.errors import UserError
from recpipe.models.histories import Histories, autoregressive, require_one_history, sides_of, up_to_each
from recpipe.models.parts import SelfAttention, outputs_of


class Block(nn.Module):
    """Attention to the events up to each, and an MLP: each takes its input normalized and is added to it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = SelfAttention(width, heads, width // heads, scale=(width // heads) ** -0.5)
        self.feed = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, events: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """float32 [B, T, width]; ``seen``: bool [B, T, T]."""
        attended = events + self.attention(self.norms[0](events), seen)
        fed: torch.Tensor = attended + self.feed(self.norms[1](attended))
        return fed


class CausalTransformer(nn.Module):
    """The state after each event of a history, of that event and those before it."""

    def __init__(
        self, events: int, width: int, blocks: int, heads: int, from_the_first: bool = False
    ) -> None:
        """``from_the_first``: whether places are counted from a history's first event, not its latest."""
        super().__init__()
        self.from_the_first = from_the_first
        if width % heads:
            raise UserError(f"model.heads={heads} does not divide the width of an event, {width}")
        # Small as rows are at first, which would else count for nothing beside places.
        self.places = nn.Parameter(0.01 * torch.randn(events, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)

    def forward(self, events: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
        """float32 [B, T, width] of ``events`` in that shape; 0 where none is ``present``, bool [B, T]."""
        # What is not there sees itself alone: a softmax needs something.
        seen = up_to_each(present) | torch.eye(present.shape[1], dtype=torch.bool, device=present.device)
        # Normalized, for rows are small at first, and what blocks add would drown them.
        events = F.layer_norm(events + self._places_of(present), events.shape[2:])
        for block in self.blocks:
            events = block(events, seen)
        states: torch.Tensor = self.norm(events) * present.unsqueeze(2)
        return states

    def _places_of(self, present: torch.Tensor) -> torch.Tensor:
        if not self.from_the_first:
            return self.places
        return F.embedding((present.cumsum(1) - 1).clamp(min=0), self.places)


class SASRec(nn.Module):
    """The product of the state after a history's latest event with the target's vector, and nothing else."""

    def __init__(
        self,
        schema: Schema,
        embedding_bag_collection: EmbeddingBagCollection | None,
        embedding_collection: EmbeddingCollection,
        blocks: Positive = 2,
        heads: Positive = 1,
        history: Positive | None = None,
        retrieval: bool = False,
        autoregressive: bool = False,
    ) -> None:
        """``embedding_bag_collection``: asked for so that other features' tables are not in the other one;
        ``history``: the latest events that are looked at, None: the sequences' ``max_length``; ``retrieval``:
        whether the output is both vectors, for a loss over several targets; ``autoregressive``: whether it
        is trained at every position of a history."""
        super().__init__()
        sides = sides_of(schema, history, "sasrec")
        if autoregressive:
            require_one_history(sides, retrieval, "sasrec")
        self.autoregressive = autoregressive
        self.histories = Histories(embedding_collection, sides)
        widths = self.histories.widths
        self.transformers = nn.ModuleList(
            # A position is that of a history which ends there, if places are counted from the first one.
            CausalTransformer(side.length, width, blocks, heads, autoregressive)
            for side, width in zip(sides, widths, strict=True)
        )
        self.retrieval, self.outputs = retrieval, outputs_of(schema)
        self.queries: nn.Module = nn.Identity()  # the paper's model has one label
        if self.outputs > 1 and not retrieval:
            self.queries = nn.Linear(sum(widths), self.outputs * sum(widths))

    def forward(
        self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor
    ) -> torch.Tensor | dict[str, Any]:
        """Logits float32 [B, L], or ``query`` and ``candidate`` [B, D]; of each position in training."""
        histories = self.histories(sparse_features)
        pairs = zip(self.transformers, histories, strict=True)
        states = [transformer(one.events, one.present) for transformer, one in pairs]
        if self.autoregressive and self.training:
            (one,), (side,), (each,) = histories, self.histories.sides, states
            return autoregressive(one, side, sparse_features, each, one.following)
        query = torch.cat([each[:, -1] for each in states], dim=1)
        candidate = torch.cat([history.target for history in histories], dim=1)
        if self.retrieval:
            return {"query": query, "candidate": candidate}
        queries = self.queries(query).view(query.shape[0], self.outputs, candidate.shape[1])
        logits: torch.Tensor = (queries * candidate.unsqueeze(1)).sum(2)
        return logits
