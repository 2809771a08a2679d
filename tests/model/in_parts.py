"""Models whose losses can, or cannot, be put together from those of parts of a batch."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torchrec.modules.embedding_modules import EmbeddingBagCollection


class Mean(nn.Module):
    """Pooled rows of all features, a layer, and a loss that is a mean over samples."""

    reduction = "mean"

    def __init__(self, embedding_bag_collection: EmbeddingBagCollection) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.rows = embedding_bag_collection
        self.width = sum(c.embedding_dim for c in embedding_bag_collection.embedding_bag_configs())
        self.over = nn.Linear(self.width, 1)

    def hidden(self, batch):
        return self.rows(batch.sparse).values()

    def forward(self, batch):
        logits = self.over(self.hidden(batch)).squeeze(1)
        return binary_cross_entropy_with_logits(logits, batch.labels, reduction=self.reduction), logits


class Sum(Mean):
    """The loss is a sum over samples."""

    reduction = "sum"


class Output(Mean):
    """Without a loss of its own."""

    def forward(self, batch):
        return super().forward(batch)[1]


class InBatch(Mean):
    """Every sample's first feature against the second feature of all samples."""

    def forward(self, batch):
        first, second, *_ = self.hidden(batch).chunk(len(self.rows.embedding_bag_configs()), dim=1)
        loss = cross_entropy(10 * first @ second.t(), torch.arange(len(first)))
        return loss + 0 * self.over.weight.sum(), self.over(self.hidden(batch)).squeeze(1)


class Normed(Mean):
    """Keeps the statistics of its batches."""

    def __init__(self, embedding_bag_collection: EmbeddingBagCollection) -> None:
        super().__init__(embedding_bag_collection)
        self.norm = nn.BatchNorm1d(self.width)

    def hidden(self, batch):
        return self.norm(super().hidden(batch))


class Counting(Mean):
    """Counts its batches in an attribute, in ways that a class of a user's may."""

    def __init__(self, embedding_bag_collection: EmbeddingBagCollection, kept: object = 0) -> None:
        super().__init__(embedding_bag_collection)
        self.kept = kept

    def hidden(self, batch):
        if isinstance(self.kept, int):
            self.kept += 1
        elif isinstance(self.kept, list):
            self.kept.append(len(batch.labels))
        elif isinstance(self.kept, torch.Tensor):
            self.kept = torch.cat([self.kept, batch.labels.mean().view(1)])
        else:
            self.kept.batches += 1
        return super().hidden(batch)


class Remembering(Mean):
    """Keeps what the last batch was like."""

    last: torch.Tensor | None = None

    def hidden(self, batch):
        self.last = super().hidden(batch)
        return self.last


class Dropped(Mean):
    """Draws random numbers."""

    def hidden(self, batch):
        return nn.functional.dropout(super().hidden(batch), 0.3, self.training)


class Shifted(Mean):
    """Looks up ids that it makes."""

    def hidden(self, batch):
        ids = batch.sparse
        made = type(ids)(ids.keys(), ids.values() // 2, lengths=ids.lengths())
        return self.rows(made).values()
