"""Small models and batches that tests of losses share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import recpipe
from recpipe.plugin.batch import Batch

ROWS, SIZE = 30, 320
QUIET = (
    "data.batch_size=32",
    "data.eval_fraction=0.2",
    "optim=sgd",
    "trainer.backend=plain",
    "trainer.progress=false",
)
FEATURES = "[{name: user, ids: rows, rows: 30}, {name: item, ids: rows, rows: 30}]"


class TwoTower(nn.Module):
    """The rows of user and item are the query and the candidate."""

    def __init__(self, names: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        tables = [
            EmbeddingBagConfig(name=name, embedding_dim=4, num_embeddings=ROWS, feature_names=[name])
            for name in ("user", "item")
        ]
        self.rows = EmbeddingBagCollection(tables)
        self.project = nn.Linear(4, 4)
        self.names = names

    def forward(self, batch: Batch) -> Any:
        rows = self.rows(batch.sparse)
        query, candidate = self.project(rows["user"]), rows["item"]
        return {"query": query, "candidate": candidate} if self.names else (query, candidate)


def batch_of(
    items: list[int],
    labels: torch.Tensor,
    weights: torch.Tensor | None = None,
    log_q: torch.Tensor | None = None,
    users: list[int] | None = None,
) -> Batch:
    size = len(items)
    ids = KeyedJaggedTensor(
        ["user", "item"],
        torch.tensor([*(users or range(size)), *items]),
        lengths=torch.ones(2 * size, dtype=torch.int64),
    )
    return Batch(torch.zeros(size, 0), ids, labels, weights=weights, log_q=log_q)


def written(folder: Path) -> Path:
    """A file of users who like the items near them, all of them clicked, and a label that is at times 0."""
    rng = np.random.default_rng(3)
    user = rng.integers(0, ROWS, SIZE)
    table = pa.table(
        {
            "click": np.ones(SIZE, np.int8),
            "buy": rng.integers(0, 2, SIZE).astype(np.int8),
            "stay": rng.normal(size=SIZE),
            "trust": rng.integers(1, 5, SIZE) / 4,
            "user": user,
            "item": (user + rng.integers(0, 3, SIZE)) % ROWS,
        }
    )
    pq.write_table(table, folder / "rows.parquet")
    return folder / "rows.parquet"


def report_of(file: Path, model: nn.Module | None, *words: str, labels: str = "[click]") -> dict[str, Any]:
    features = f"data.features={{labels: {labels}, features: {FEATURES}}}"
    with recpipe.train(model, file, *QUIET, features, *words, quiet=True) as run:
        return dict(run.report)
