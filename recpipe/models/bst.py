"""BST, the Behavior Sequence Transformer: Chen et al., 2019, https://arxiv.org/abs/1905.06874."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.common.validation import Positive
from recpipe.data.schema import Schema
from recpipe.errors import UserError
from recpipe.model.config import Dropout, Sizes
from recpipe.models.histories import Context, Histories, History, sides_of
from recpipe.models.parts import SelfAttention, last_layers, outputs_of


class Block(nn.Module):
    """A transformer's layer: attention, and two linear layers with a leaky ReLU between, each added to its
    input and normalized."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = SelfAttention(width, heads, width // heads, scale=(width // heads) ** -0.5)
        self.joined = nn.Linear(width, width, bias=False)
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, events: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
        """float32 [B, N, width]; ``present``: bool [B, N]."""
        attended = self.norms[0](events + self.joined(self.attention(events, present)))
        fed: torch.Tensor = self.norms[1](attended + self.second(F.leaky_relu(self.first(attended))))
        return fed


class Behavior(nn.Module):
    """A history's events and its target after them, each with a learned vector of its place, through the
    blocks."""

    def __init__(self, events: int, width: int, place_dim: int, blocks: int, heads: int) -> None:
        super().__init__()
        dim = width + place_dim
        if dim % heads:
            raise UserError(
                f"model.heads={heads} does not divide the width of an event, {width}, and of its place, "
                f"{place_dim}: {dim}"
            )
        self.places = nn.Parameter(torch.randn(events + 1, place_dim) * place_dim**-0.5)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(blocks))
        self.width = (events + 1) * dim

    def forward(self, history: History) -> torch.Tensor:
        """float32 [B, width]; 0 where there is no event."""
        events = torch.cat([history.events, history.target.unsqueeze(1)], dim=1)
        present = F.pad(history.present, (0, 1), value=True)
        events = torch.cat([events, self.places.expand(events.shape[0], -1, -1)], dim=2)
        for block in self.blocks:
            events = block(events, present)
        return (events * present.unsqueeze(2)).flatten(1)


class BST(nn.Module):
    """An MLP over a transformer's view of the history with its target, and everything else of the sample."""

    def __init__(
        self,
        schema: Schema,
        embedding_bag_collection: EmbeddingBagCollection | None,
        embedding_collection: EmbeddingCollection,
        num_dense_features: int,
        hidden: Sizes,
        blocks: Positive = 1,
        heads: Positive = 8,
        place_dim: Positive = 8,
        history: Positive | None = None,
        dropout: Dropout = 0.0,
    ) -> None:
        """``place_dim``: of the vector of each place; ``history``: the latest events that are looked at,
        None: the sequences' ``max_length``."""
        super().__init__()
        sides = sides_of(schema, history, "bst")
        self.histories = Histories(embedding_collection, sides)
        self.context = Context(embedding_bag_collection, num_dense_features)
        behaviors = [
            Behavior(side.length, width, place_dim, blocks, heads)
            for side, width in zip(sides, self.histories.widths, strict=True)
        ]
        self.behaviors = nn.ModuleList(behaviors)
        seen = sum(behavior.width for behavior in behaviors)
        self.top = last_layers(self.context.width + seen, hidden, outputs_of(schema), dropout)

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """Logits float32 [B, L]."""
        histories = self.histories(sparse_features)
        seen = [behavior(history) for behavior, history in zip(self.behaviors, histories, strict=True)]
        logits: torch.Tensor = self.top(torch.cat([self.context(dense_features, sparse_features), *seen], 1))
        return logits
