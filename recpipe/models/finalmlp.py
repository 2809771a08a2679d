"""FinalMLP: Mao et al., 2023, https://arxiv.org/abs/2304.00902."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.mlp import MLP
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.common.validation import Positive
from recpipe.data.schema import Schema
from recpipe.errors import UserError
from recpipe.model.config import Dropout, Sizes
from recpipe.model.dropout import dropping
from recpipe.models.parts import Fields, Places, last_layers, outputs_of


class Gate(nn.Module):
    """Weights in (0, 2) of all values of the fields, by an MLP over some of these fields, or over one learned
    vector."""

    def __init__(self, fields: int, dim: int, places: Sequence[int], hidden: Sequence[int]) -> None:
        super().__init__()
        self.places = Places(places)
        self.always = None if places else nn.Parameter(torch.zeros(1, dim))
        self.mlp = last_layers(max(1, len(places)) * dim, hidden, fields * dim)

    def forward(self, fields: torch.Tensor) -> torch.Tensor:
        """float32 [B, F, dim] to [B, F * dim]."""
        seen = self.places(fields).flatten(1) if self.always is None else self.always
        return fields.flatten(1) * (2 * torch.sigmoid(self.mlp(seen)))


class Fusion(nn.Module):
    """b + w·x + v·y + the sum over heads of x_h^T W_h y_h: float32 [B, X] and [B, Y] to [B, outputs]."""

    def __init__(self, left: int, right: int, heads: int, outputs: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(left, outputs), nn.Linear(right, outputs, bias=False)
        sizes = left // heads, right // heads
        first = torch.randn(heads, *sizes, outputs) * (2 / sum(sizes)) ** 0.5  # Glorot's
        self.products = nn.Parameter(first)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        heads = self.products.shape[0]
        parts = x.view(x.shape[0], heads, -1), y.view(y.shape[0], heads, -1)
        both = torch.einsum("bhi,hijo,bhj->bo", parts[0], self.products, parts[1])
        linear: torch.Tensor = self.left(x) + self.right(y)
        return linear + both


class FinalMLP(nn.Module):
    """Two MLPs over the same fields, each gated for its own view of them, whose outputs are multiplied."""

    def __init__(
        self,
        schema: Schema,
        embedding_bag_collection: EmbeddingBagCollection,
        embedding_dim: int,
        left: Sizes,
        right: Sizes,
        gate: Sizes,
        heads: Positive = 2,
        left_gate: list[str] | None = None,
        right_gate: list[str] | None = None,
        dropout: Dropout = 0.0,
    ) -> None:
        """``left_gate``, ``right_gate``: the features by which each MLP's inputs are weighted, those of the
        user and of the item for example; None: the same for all samples."""
        super().__init__()
        if left[-1] % heads or right[-1] % heads:
            raise UserError(
                f"model.heads={heads} does not divide the last widths of model.left and model.right, "
                f"{left[-1]} and {right[-1]}"
            )
        self.fields = Fields(embedding_bag_collection, schema, embedding_dim)
        count = len(self.fields.names)
        seen = [self.fields.places(left_gate or [], "model.left_gate")]
        seen.append(self.fields.places(right_gate or [], "model.right_gate"))
        self.gates = nn.ModuleList(Gate(count, embedding_dim, places, gate) for places in seen)
        mlps = (MLP(count * embedding_dim, list(sizes)) for sizes in (left, right))
        self.mlps = nn.ModuleList(dropping(mlp, dropout) for mlp in mlps)
        self.fusion = Fusion(left[-1], right[-1], heads, outputs_of(schema))

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """Logits float32 [B, L]."""
        fields = self.fields(dense_features, sparse_features)
        streams = [mlp(gate(fields)) for mlp, gate in zip(self.mlps, self.gates, strict=True)]
        logits: torch.Tensor = self.fusion(*streams)
        return logits
