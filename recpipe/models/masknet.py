"""MaskNet: Wang et al., 2021, https://arxiv.org/abs/2102.07619."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Gt
from torch import nn
from torch.nn import functional as F
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.common.validation import one_of
from recpipe.data.schema import Schema
from recpipe.model.config import Dropout, Sizes
from recpipe.models.parts import Fields, last_layers, outputs_of


class FieldNorm(nn.Module):
    """Layer normalization of each field's vector, with weights of its own."""

    def __init__(self, fields: int, dim: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(fields, dim)), nn.Parameter(torch.zeros(fields, dim))

    def forward(self, fields: torch.Tensor) -> torch.Tensor:
        """float32 [B, F, dim]."""
        return F.layer_norm(fields, fields.shape[2:]) * self.scale + self.shift


class MaskBlock(nn.Module):
    """ReLU(norm(W (mask * x))), where the mask is an MLP over all fields as they are."""

    def __init__(self, fields: int, width: int, outputs: int, ratio: float, dropout: float) -> None:
        super().__init__()
        self.mask = last_layers(fields, [max(1, int(ratio * width))], width)
        self.masked, self.norm = nn.Linear(width, outputs, bias=False), nn.LayerNorm(outputs)
        self.dropout = dropout

    def forward(self, fields: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """All values of the fields, float32 [B, F * dim], and what is masked, [B, width], to [B, outputs]."""
        made = self.norm(self.masked(self.mask(fields) * inputs)).relu()
        return F.dropout(made, self.dropout, self.training)


class MaskNet(nn.Module):
    """Mask blocks one after the other over the normalized fields (``serial``), or side by side before an MLP
    (``parallel``)."""

    def __init__(
        self,
        schema: Schema,
        embedding_bag_collection: EmbeddingBagCollection,
        embedding_dim: int,
        blocks: Sizes,
        hidden: Sizes,
        reduction_ratio: Annotated[float, Gt(0)] = 1.0,
        structure: Annotated[str, one_of("serial", "parallel")] = "serial",
        dropout: Dropout = 0.0,
    ) -> None:
        """``blocks``: the width of each block's output; ``reduction_ratio``: that of the hidden layer of a
        mask, over what is masked; ``hidden``: layers of the MLP after parallel blocks."""
        super().__init__()
        self.fields = Fields(embedding_bag_collection, schema, embedding_dim)
        count, outputs = len(self.fields.names), outputs_of(schema)
        self.norm, self.parallel = FieldNorm(count, embedding_dim), structure == "parallel"
        seen = count * embedding_dim
        widths = [seen] * len(blocks) if self.parallel else [seen, *blocks[:-1]]
        pairs = zip(widths, blocks, strict=True)
        self.blocks = nn.ModuleList(
            MaskBlock(seen, width, own, reduction_ratio, dropout) for width, own in pairs
        )
        if self.parallel:
            self.top = last_layers(sum(blocks), hidden, outputs, dropout)
        else:
            self.top = nn.Linear(blocks[-1], outputs)

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """Logits float32 [B, L]."""
        fields = self.fields(dense_features, sparse_features)
        seen, found = fields.flatten(1), self.norm(fields).flatten(1)
        if self.parallel:
            found = torch.cat([block(seen, found) for block in self.blocks], dim=1)
        else:
            for block in self.blocks:
                found = block(seen, found)
        logits: torch.Tensor = self.top(found)
        return logits
