"""What several models are built of: linear parts, a vector for each field, attention, and the last layers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn
from torch.nn import functional as F
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.mlp import MLP
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.data.schema import Schema
from recpipe.errors import UserError, nearest_or_all, shown
from recpipe.model.dlrm import CPU, META, ProjectedSparseArch
from recpipe.model.dropout import dropping

WIDE = "wide_"
"""What the names of tables with the weights of a linear part begin with."""


def outputs_of(schema: Schema) -> int:
    """How many outputs a model has: one for each label."""
    return max(1, len(schema.labels))


Made = TypeVar("Made", bound=nn.Module)


def glorot(module: Made, constant: bool = False) -> Made:
    """The module, whose linear layers begin with Glorot's uniform values and biases of 0.

    Those are the first values of TensorFlow's layers, with which the code of DIN's authors begins. PyTorch's
    are about half of their size, and DIN, DIEN, MMoE, PLE and two towers learn less of an epoch from them.

    ``constant``: whether the first layer's first input is always 1, so that its weights are biases.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    for layer in layers:
        nn.init.xavier_uniform_(layer.weight)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
    if constant:
        nn.init.zeros_(layers[0].weight[:, 0])
    return module


def last_layers(width: int, hidden: Sequence[int], outputs: int, dropout: float = 0.0) -> nn.Module:
    """Hidden layers with ReLU and dropout, and a linear one: float32 [B, width] to [B, outputs]."""
    return nn.Sequential(dropping(MLP(width, list(hidden)), dropout), nn.Linear(hidden[-1], outputs))


def width_of(collection: EmbeddingBagCollection) -> int:
    """The width of a sample's pooled rows side by side."""
    return sum(c.embedding_dim * len(c.feature_names) for c in collection.embedding_bag_configs())


def features_of(collection: EmbeddingBagCollection) -> list[str]:
    """The features of its tables, in their order."""
    return [name for config in collection.embedding_bag_configs() for name in config.feature_names]


class Places:
    """Takes some places of tensors [B, N, ...], in their order, by slices: a list of places would be copied
    to a GPU at each call."""

    def __init__(self, places: Sequence[int]) -> None:
        self._runs: list[slice] = []
        for place in places:
            if self._runs and self._runs[-1].stop == place:
                self._runs[-1] = slice(self._runs[-1].start, place + 1)
            else:
                self._runs.append(slice(place, place + 1))
        self.count = len(places)

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """[B, count, ...]."""
        parts = [values[:, run] for run in self._runs or [slice(0)]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def require_known(names: Sequence[str], known: Sequence[str], key: str) -> None:
    """``UserError`` if a feature that the recipe's ``key`` lists is not among those that are ``known``."""
    for name in names:
        if name not in known:
            raise UserError(f"{key}: no feature '{shown(name)}'; {nearest_or_all(name, known)}")


def candidates_of(schema: Schema, named: Sequence[str], known: Sequence[str]) -> Sequence[str]:
    """The candidate's features: those that the recipe has ``named``, or whose side the ``schema`` says.
    ``UserError`` if neither does, or if the two contradict each other."""
    require_known(named, known, "model.candidate")
    if not named and not schema.items:
        raise UserError(
            "model=two_tower: which features are the candidate's? Say side: item of them in data.features, "
            "or name them, model.candidate=[item,price]"
        )
    for name in named:
        if name in schema.users or (schema.items and name not in schema.items):
            said = "side: user" if name in schema.users else "no side: item"
            raise UserError(
                f"model.candidate names '{shown(name)}', of which data.features say {said}: leave "
                "model.candidate out, or say the same"
            )
    left = next((name for name in schema.items if named and name not in named), None)
    if left is not None:
        raise UserError(
            f"model.candidate lacks '{shown(left)}', of which data.features say side: item: leave "
            "model.candidate out, or say the same"
        )
    return named or schema.items


class LinearPart(nn.Module):
    """w·x + b: each id and each dense feature has a weight for each output.

    The weights of ids are rows of tables of their own, ``wide_TABLE`` beside each TABLE of ``collection``.
    Rows have a multiple of 4 columns, of which the first ``outputs`` count.
    """

    def __init__(
        self,
        collection: EmbeddingBagCollection,
        num_dense_features: int,
        outputs: int,
        only: Collection[str] | None = None,
    ) -> None:
        """``only``: the features whose ids have weights; None: all."""
        super().__init__()
        self.outputs, self.columns = outputs, -(-outputs // 4) * 4
        self.embedding_bag_collection = EmbeddingBagCollection(
            [
                replace(
                    config, name=f"{WIDE}{config.name}", embedding_dim=self.columns, feature_names=features
                )
                for config in collection.embedding_bag_configs()
                if (features := [f for f in config.feature_names if only is None or f in only])
            ],
            is_weighted=collection.is_weighted(),
            device=META,
        )
        self.dense = nn.Linear(num_dense_features, outputs)

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """float32 [B, outputs]."""
        rows = self.embedding_bag_collection(sparse_features).values()
        weights = rows.view(rows.shape[0], -1, self.columns)[:, :, : self.outputs]
        linear: torch.Tensor = weights.sum(1) + self.dense(dense_features)
        return linear


class Experts(nn.Module):
    """MLPs side by side over the same inputs: float32 [B, width] to [B, E, W]."""

    def __init__(self, width: int, count: int, layers: Sequence[int]) -> None:
        super().__init__()
        self.mlps = nn.ModuleList(glorot(MLP(width, list(layers))) for _ in range(count))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.stack([mlp(inputs) for mlp in self.mlps], dim=1)


class Gate(nn.Module):
    """Mixes what experts have made by softmax(W x)."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.weigh = glorot(nn.Linear(width, experts, bias=False))

    def forward(self, inputs: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        """float32 [B, width] and the outputs of experts [B, E, W] to [B, W]."""
        weights = torch.softmax(self.weigh(inputs), dim=1)
        return (weights.unsqueeze(2) * made).sum(1)


class Fields(nn.Module):
    """A vector of ``dim`` values for each field: the pooled rows of each sparse feature, projected where a
    table has another dimension, and for each dense feature a learned vector times its value."""

    def __init__(self, collection: EmbeddingBagCollection, schema: Schema, dim: int) -> None:
        super().__init__()
        self.sparse_arch = ProjectedSparseArch(collection, dim, CPU)
        self.names = [*features_of(collection), *schema.dense]
        """The fields in their order."""
        # Small, since products of pairs would else begin with large sums.
        self.numbers = nn.Parameter(0.01 * torch.randn(len(schema.dense), dim))

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """float32 [B, F, dim]."""
        dense = dense_features[:, : self.numbers.shape[0]]  # without any, batches have a constant there
        return torch.cat([self.sparse_arch(sparse_features), dense.unsqueeze(2) * self.numbers], dim=1)

    def places(self, names: Sequence[str], key: str) -> list[int]:
        """The places of the fields ``names``, which the recipe's ``key`` lists; ``UserError`` for another."""
        require_known(names, self.names, key)
        return [self.names.index(name) for name in names]


class SelfAttention(nn.Module):
    """softmax(scale * Q K^T) V of ``heads`` heads side by side; Q, K and V are projections of the same
    vectors: float32 [B, N, dim] to [B, N, heads * width]."""

    def __init__(self, dim: int, heads: int, width: int, scale: float) -> None:
        super().__init__()
        self.heads, self.width, self.scale = heads, width, scale
        self.project = nn.Linear(dim, 3 * heads * width, bias=False)

    def forward(self, vectors: torch.Tensor, present: torch.Tensor | None = None) -> torch.Tensor:
        """``present``: which vectors are attended to, bool [B, N], or [B, N, N] where each has others; None:
        all."""
        size, count, _ = vectors.shape
        q, k, v = self.project(vectors).view(size, count, 3, self.heads, self.width).permute(2, 0, 3, 1, 4)
        mask = None
        if present is not None:
            mask = present[:, None] if present.dim() == 3 else present[:, None, None]
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        return found.transpose(1, 2).flatten(2)
