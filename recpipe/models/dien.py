"""DIEN: Zhou et al., 2019, https://arxiv.org/abs/1809.03672."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Interval
from torch import nn
from torch.nn import functional as F
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.common.validation import Positive
from recpipe.data.schema import Schema
from recpipe.model.config import Dropout, Sizes
from recpipe.models.histories import Context, Histories, History, sides_of
from recpipe.models.parts import glorot, last_layers, outputs_of


class AttentionalGru(nn.Module):
    """AUGRU: a GRU whose update gate is multiplied by how near each input is to the target."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.of_inputs, self.of_state = (glorot(nn.Linear(width, 3 * width)) for _ in range(2))

    def forward(self, inputs: torch.Tensor, near: torch.Tensor) -> torch.Tensor:
        """The last state [B, width] of ``inputs`` float32 [B, T, width]; 0 in ``near`` [B, T] keeps it."""
        state, gates = torch.zeros_like(inputs[:, 0]), self.of_inputs(inputs)
        # Unbound, for the gradient of each step's part would else be as large as that of all steps.
        for gate, close in zip(gates.unbind(1), near.unsqueeze(2).unbind(1), strict=True):
            reset, update, new = gate.chunk(3, dim=1)
            own_reset, own_update, own_new = self.of_state(state).chunk(3, dim=1)
            candidate = torch.tanh(new + torch.sigmoid(reset + own_reset) * own_new)
            state = state + torch.sigmoid(update + own_update) * close * (candidate - state)
        return state


def next_event_loss(states: torch.Tensor, events: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """The auxiliary loss, a mean over samples and places: the state after each event tells the next one from
    another, which is the one in its place of the sample half a batch away (beside a sample there often are
    others of the same history). Where both are the same event, nothing is told apart.

    ``states``, ``events``: float32 [B, T, E]; ``there``: bool [B, T], those from the first on.
    """
    half, known = len(events) // 2, there[:, 1:]
    states, wanted, others = states[:, :-1], events[:, 1:], events.roll(half, 0)[:, 1:]
    drawn = known & there.roll(half, 0)[:, 1:] & (wanted != others).any(2)
    good = F.logsigmoid((states * wanted).sum(2)) * known
    bad = F.logsigmoid(-(states * others).sum(2)) * drawn
    return -(good + bad).sum() / max(1, known.numel())


class Evolution(nn.Module):
    """A GRU over the events, and an AUGRU over its states, by their nearness to the target."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.extractor = nn.GRU(width, width, batch_first=True)
        self.nearness = glorot(nn.Linear(width, width, bias=False))
        self.evolving = AttentionalGru(width)

    def forward(self, history: History, learns: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The interest at the end, float32 [B, E], and, if it ``learns`` next events, their loss."""
        # From the first event on: a GRU's state moves where there is none.
        counts, places = history.present.sum(1, keepdim=True), history.present.shape[1]
        there = (order := torch.arange(places, device=counts.device)) < counts
        events = history.events.gather(1, ((order - counts) % places)[:, :, None].expand_as(history.events))
        states, _ = self.extractor(events)
        near = (states @ self.nearness(history.target).unsqueeze(2)).squeeze(2)
        near = near.masked_fill(~there, torch.finfo(near.dtype).min).softmax(1) * there
        interest: torch.Tensor = self.evolving(states, near)
        return interest, next_event_loss(states, events, there) if learns else interest.new_zeros(())


class DIEN(nn.Module):
    """An MLP over the target, the interest that has evolved towards it, and everything else of a sample."""

    def __init__(
        self,
        schema: Schema,
        embedding_bag_collection: EmbeddingBagCollection | None,
        embedding_collection: EmbeddingCollection,
        num_dense_features: int,
        hidden: Sizes,
        auxiliary: Annotated[float, Interval(ge=0)] = 0.0,
        history: Positive | None = None,
        dropout: Dropout = 0.0,
    ) -> None:
        """``auxiliary``: what the loss of next events is multiplied by; ``history``: the latest events that
        are looked at, None: the sequences' ``max_length``."""
        super().__init__()
        self.histories = Histories(embedding_collection, sides_of(schema, history, "dien"))
        self.context = Context(embedding_bag_collection, num_dense_features)
        widths = self.histories.widths
        self.evolutions = nn.ModuleList(Evolution(width) for width in widths)
        top = last_layers(self.context.width + 2 * sum(widths), hidden, outputs_of(schema), dropout)
        self.top = glorot(top, constant=not schema.dense)
        self.auxiliary, self.whole_batch = auxiliary, auxiliary > 0

    def forward(
        self,
        dense_features: torch.Tensor,
        sparse_features: KeyedJaggedTensor,
        labels: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Logits float32 [B, L]; with ``auxiliary`` and ``labels`` [B] or [B, L], after the model's own loss:
        binary cross-entropy and that of next events."""
        known, loss = [self.context(dense_features, sparse_features)], dense_features.new_zeros(())
        learns = labels is not None and self.auxiliary > 0
        for evolution, history in zip(self.evolutions, self.histories(sparse_features), strict=True):
            interest, own = evolution(history, learns)
            known, loss = [*known, history.target, interest], loss + self.auxiliary * own
        logits: torch.Tensor = self.top(torch.cat(known, dim=1))
        if labels is None or not learns:
            return logits
        each = F.binary_cross_entropy_with_logits(logits.view_as(labels), labels, weights, reduction="none")
        return loss + each.mean(0).sum(), logits
