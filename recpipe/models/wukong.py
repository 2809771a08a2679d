"""WuKong: Zhang et al., 2024, https://arxiv.org/abs/2403.02545."""

from __future__ import annotations

import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.common.validation import Positive
from recpipe.data.schema import Schema
from recpipe.model.config import Dropout, Sizes
from recpipe.models.parts import Fields, last_layers, outputs_of


class FactorizationMachineBlock(nn.Module):
    """All products <x_i, x_j> of n vectors, compressed to n x ``rank``, through an MLP that makes ``count``
    new vectors of them."""

    def __init__(self, inputs: int, dim: int, rank: int, hidden: Sizes, count: int) -> None:
        super().__init__()
        self.count, self.dim = count, dim
        self.compress = nn.Linear(inputs, rank, bias=False)
        self.norm = nn.LayerNorm(inputs * rank)
        self.mlp = last_layers(inputs * rank, hidden, count * dim)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """float32 [B, n, dim] to [B, count, dim]. X (X^T Y) instead of (X X^T) Y: linear in n."""
        products = vectors @ self.compress(vectors.transpose(1, 2))
        made: torch.Tensor = self.mlp(self.norm(products.flatten(1)))
        return made.view(made.shape[0], self.count, self.dim)


class LinearCompressBlock(nn.Module):
    """``count`` linear mixtures of n vectors: float32 [B, n, dim] to [B, count, dim]."""

    def __init__(self, inputs: int, count: int) -> None:
        super().__init__()
        self.mix = nn.Linear(inputs, count, bias=False)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.mix(vectors.transpose(1, 2))
        return mixed.transpose(1, 2)


class Layer(nn.Module):
    """Both blocks' vectors, added to the layer's input (mixed to as many vectors where these are others) and
    normalized."""

    def __init__(self, inputs: int, dim: int, rank: int, hidden: Sizes, products: int, mixtures: int) -> None:
        super().__init__()
        outputs = products + mixtures
        self.products = FactorizationMachineBlock(inputs, dim, rank, hidden, products)
        self.mixtures = LinearCompressBlock(inputs, mixtures)
        self.residual = nn.Identity() if inputs == outputs else LinearCompressBlock(inputs, outputs)
        self.norm = nn.LayerNorm(dim)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """float32 [B, n, dim] to [B, products + mixtures, dim]."""
        made = torch.cat([self.products(vectors), self.mixtures(vectors)], dim=1)
        normed: torch.Tensor = self.norm(made + self.residual(vectors))
        return normed


class WuKong(nn.Module):
    """Layers of factorization machines over the fields' vectors, of which each sees products of twice the
    degree of those before, and an MLP over the last layer's vectors."""

    def __init__(
        self,
        schema: Schema,
        embedding_bag_collection: EmbeddingBagCollection,
        embedding_dim: int,
        hidden: Sizes,
        products_hidden: Sizes,
        layers: Positive = 2,
        products: Positive = 8,
        mixtures: Positive = 8,
        rank: Positive = 8,
        dropout: Dropout = 0.0,
    ) -> None:
        """``products_hidden``: hidden layers of the MLPs over products; ``products`` and ``mixtures``: how
        many vectors each layer makes by its two blocks; ``rank``: of the compressed products."""
        super().__init__()
        self.fields = Fields(embedding_bag_collection, schema, embedding_dim)
        counts = [len(self.fields.names), *[products + mixtures] * layers]
        self.layers = nn.Sequential(
            *(Layer(n, embedding_dim, rank, products_hidden, products, mixtures) for n in counts[:-1])
        )
        self.top = last_layers(counts[-1] * embedding_dim, hidden, outputs_of(schema), dropout)

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """Logits float32 [B, L]."""
        vectors = self.layers(self.fields(dense_features, sparse_features))
        logits: torch.Tensor = self.top(vectors.flatten(1))
        return logits
