"""A model and data with what the suite's first run lacks: weighted, MEAN and unpooled tables, bags of any
length, and tables of more than 200,000 rows whose ids lie anywhere in them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.data.given import GivenBatches
from recpipe.plugin.batch import Batch

SIZE, STEPS, HELD_OUT = 96, 32, 4
"""Samples of a batch, batches of an epoch, the last of which is short, and held-out batches."""
DENSE = 3
ROWS = {"user": 260_000, "page": 220_000, "place": 40, "goods": 3_000, "words": 2_000}
LONGEST = {"user": 3, "place": 1, "page": 2, "liked": 4, "seen": 3, "words": 3, "title": 1}
"""The largest number of ids in a bag of each feature; a bag of the features with 1 has no fewer."""
_TABLE_OF = {"liked": "goods", "seen": "goods", "title": "words"}


class Varied(nn.Module):
    """Three collections of bags, of which one is weighted and one takes means, and one of single rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weighted = EmbeddingBagCollection([_bags("user", 8), _bags("place", 8)], is_weighted=True)
        self.summed = EmbeddingBagCollection([_bags("page", 16)])
        self.means = EmbeddingBagCollection([_bags("goods", 4, PoolingType.MEAN, ["liked", "seen"])])
        words = EmbeddingConfig(
            name="words", embedding_dim=8, num_embeddings=ROWS["words"], feature_names=["words", "title"]
        )
        self.rows = EmbeddingCollection([words])
        self.over = nn.Sequential(nn.Linear(16 + 16 + 8 + 16 + DENSE, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss, and logits [B]."""
        found = self.rows(batch.sparse)
        words, title = found["words"], found["title"].values()
        samples = torch.repeat_interleave(torch.arange(batch.size), words.lengths().long())
        alike = torch.tanh(words.values() * title[samples])
        text = torch.zeros_like(title).index_add(0, samples, alike)
        bags = [each(batch.sparse).values() for each in (self.weighted, self.summed, self.means)]
        logits = self.over(torch.cat([*bags, text, title, batch.dense], dim=1)).squeeze(1)
        return binary_cross_entropy_with_logits(logits, batch.labels), logits


def _bags(
    table: str, dim: int, pooling: PoolingType = PoolingType.SUM, features: Sequence[str] = ()
) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=table,
        embedding_dim=dim,
        num_embeddings=ROWS[table],
        feature_names=list(features or [table]),
        pooling=pooling,
    )


def model(seed: int = 7) -> Varied:
    """With first weights that are the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Varied()


def data() -> GivenBatches:
    """The same batches at every call. Popular ids of ``page`` and ``place`` are the largest, of the others
    the smallest; one of eight ids is any of its table's."""
    rng = np.random.default_rng(11)
    sizes = [SIZE] * (STEPS - 1) + [SIZE // 3]
    return GivenBatches([_batch(rng, size) for size in sizes], [_batch(rng, SIZE) for _ in range(HELD_OUT)])


def _batch(rng: np.random.Generator, size: int) -> Batch:
    lengths, ids = [], []
    for feature, most in LONGEST.items():
        own = rng.integers(0 if most > 1 else 1, most + 1, size)
        lengths.append(own)
        ids.append(_ids(rng, _TABLE_OF.get(feature, feature), int(own.sum())))
    values = np.concatenate(ids)
    weights = rng.uniform(0.5, 1.5, len(values)).astype(np.float32)
    sparse = KeyedJaggedTensor(
        list(LONGEST),
        torch.from_numpy(values),
        weights=torch.from_numpy(weights),
        lengths=torch.from_numpy(np.concatenate(lengths).astype(np.int32)),
    )
    dense = rng.standard_normal((size, DENSE), np.float32)
    clicked = 0.8 * dense[:, 0] + rng.standard_normal(size) > 0.6
    return Batch(torch.from_numpy(dense), sparse, torch.from_numpy(clicked.astype(np.float32)))


def _ids(rng: np.random.Generator, table: str, count: int) -> NDArray[np.int64]:
    rows = ROWS[table]
    skewed = (rows * rng.random(count) ** 6).astype(np.int64)
    if table in ("page", "place"):
        skewed = rows - 1 - skewed
    anywhere = rng.integers(0, rows, count)
    found: NDArray[np.int64] = np.where(rng.random(count) < 1 / 8, anywhere, skewed)
    return found
