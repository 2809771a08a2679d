"""Models of a user's own whose rows are not pooled, and data with histories, for tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from recpipe.data.schema import Schema
from recpipe.plugin.batch import Batch
from tests.answers.answers import put

DIM, MOST, ROWS = 8, 6, {"item": 200, "history": 200, "shops": 40, "user": 300}
WORDS = (
    "data=parquet",
    "data.label=click",
    "data.dense=[price]",
    "data.sparse=[item,history,shops,user]",
    "data.tables={item: 200, history: 200, shops: 40, user: 300}",
    "data.hash_ids=false",
    "data.batch_size=128",
    "model=custom",
    "model._target_=tests.answers.attention.Attention",
    "trainer.progress=false",
    "trainer.logger=null",
)


class Attention(nn.Module):
    """Attention of an item over a history, each event of which has an item and a shop; the items' table is
    shared, and the user's rows are pooled."""

    def __init__(self, schema: Schema) -> None:
        super().__init__()
        self.events = EmbeddingCollection(
            [
                EmbeddingConfig(
                    name="goods", embedding_dim=DIM, num_embeddings=200, feature_names=["item", "history"]
                ),
                EmbeddingConfig(name="shops", embedding_dim=DIM, num_embeddings=40, feature_names=["shops"]),
            ]
        )
        user = EmbeddingBagConfig(name="user", embedding_dim=4, num_embeddings=300, feature_names=["user"])
        self.bags = EmbeddingBagCollection([user])
        self.top = nn.Sequential(nn.Linear(2 * DIM + 4 + len(schema.dense), 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits [B, 1]."""
        found = self.events(batch.sparse_features)
        item = found["item"].values()
        history = found["history"].to_padded_dense(MOST) + found["shops"].to_padded_dense(MOST)
        lengths = found["history"].lengths()
        there = torch.arange(MOST) < lengths.unsqueeze(1)
        closeness = (history * item.unsqueeze(1)).sum(2).masked_fill(~there, -1e9)
        taste = (closeness.softmax(1).unsqueeze(2) * history).sum(1)
        pooled = self.bags(batch.sparse_features).values()
        return self.top(torch.cat([taste, item, pooled, batch.dense_features], dim=1))


def histories(folder: Path, rows: int = 2000) -> Path:
    """A parquet file of clicks that depend on whether an item was seen before."""
    rng = np.random.default_rng(5)
    seen = [rng.integers(0, 200, n) for n in rng.integers(0, 9, rows)]
    again = rng.random(rows) < 0.5
    item = np.array([s[0] if len(s) and a else rng.integers(200) for s, a in zip(seen, again, strict=True)])
    chance = np.array([0.8 if i in s[:MOST] else 0.2 for i, s in zip(item, seen, strict=True)])
    table = pa.table(
        {
            "click": (rng.random(rows) < chance).astype(np.int8),
            "price": rng.gamma(2.0, 10.0, rows),
            "item": item,
            "history": [s.tolist() for s in seen],
            "shops": [(s % 40).tolist() for s in seen],
            "user": rng.integers(0, 300, rows),
        }
    )
    return put(table, folder / "histories.parquet")
