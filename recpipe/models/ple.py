"""PLE, progressive layered extraction: Tang et al., 2020, https://dl.acm.org/doi/10.1145/3383313.3412236."""

from __future__ import annotations

import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.common.validation import Positive
from recpipe.data.schema import Schema
from recpipe.model.config import Sizes
from recpipe.models.parts import Experts, Gate, glorot, last_layers, outputs_of, width_of


class Extraction(nn.Module):
    """One layer: experts of each label and shared ones. Each label mixes its own with the shared ones, and
    the shared stream, which the last layer does not need, mixes all."""

    def __init__(self, width: int, labels: int, own: int, shared: int, expert: Sizes, is_last: bool) -> None:
        super().__init__()
        counts = [*[own] * labels, shared]
        self.experts = nn.ModuleList(Experts(width, count, expert) for count in counts)
        self.gates = nn.ModuleList(Gate(width, own + shared) for _ in range(labels))
        self.shared_gate = None if is_last else Gate(width, sum(counts))

    def forward(self, streams: list[torch.Tensor]) -> list[torch.Tensor]:
        """A stream [B, width] of each label, then the shared one, to [B, W] each."""
        made = [experts(stream) for experts, stream in zip(self.experts, streams, strict=True)]
        found = [
            gate(stream, torch.cat([own, made[-1]], dim=1))
            for gate, stream, own in zip(self.gates, streams[:-1], made[:-1], strict=True)
        ]
        if self.shared_gate is not None:
            found.append(self.shared_gate(streams[-1], torch.cat(made, dim=1)))
        return found


class PLE(nn.Module):
    """Layers of extraction, and a tower of each label over its stream."""

    def __init__(
        self,
        schema: Schema,
        embedding_bag_collection: EmbeddingBagCollection,
        num_dense_features: int,
        expert: Sizes,
        tower: Sizes,
        layers: Positive = 2,
        own_experts: Positive = 2,
        shared_experts: Positive = 2,
    ) -> None:
        """``expert``, ``tower``: layers of each expert, and of each label's MLP."""
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        width, outputs = num_dense_features + width_of(embedding_bag_collection), outputs_of(schema)
        widths, counts = [width, *[expert[-1]] * (layers - 1)], (outputs, own_experts, shared_experts)
        self.layers = nn.ModuleList(
            Extraction(own, *counts, expert, is_last=number == layers) for number, own in enumerate(widths, 1)
        )
        self.towers = nn.ModuleList(glorot(last_layers(expert[-1], tower, 1)) for _ in range(outputs))

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """A logit of each label, float32 [B, L]."""
        pooled = self.embedding_bag_collection(sparse_features).values()
        streams = [torch.cat([dense_features, pooled], dim=1)] * (len(self.towers) + 1)
        for layer in self.layers:
            streams = layer(streams)
        return torch.cat([tower(own) for tower, own in zip(self.towers, streams, strict=True)], dim=1)
