"""The work of all sides: a DLRM of TorchRec's, tables like Criteo's with its skew, batches in host memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

DENSE = 13
ROWS = (
    *(1460, 583, 1000000, 1000000, 305, 24, 12517, 633, 3, 93145, 5683, 1000000, 3194),
    *(27, 14992, 1000000, 10, 5652, 2173, 4, 1000000, 18, 15, 286181, 105, 142572),
)
"""Rows of the 26 one-hot features' tables: Criteo's, at most a million each."""
ZIPF = 1.12
"""The r-th most popular row of a table is drawn in proportion to r^-ZIPF."""
LEARNING_RATE, EPSILON = 0.02, 1e-8


@dataclass(frozen=True)
class Size:
    """What a run trains: width of rows, samples of a batch, number of batches, and a divisor of all tables'
    rows for a try."""

    dim: int
    batch: int
    steps: int
    smaller: int = 1

    @property
    def tables(self) -> dict[str, int]:
        """Rows of each feature's table."""
        return {f"C{n}": max(3, rows // self.smaller) for n, rows in enumerate(ROWS, 1)}

    @property
    def record_bytes(self) -> int:
        """Bytes of a row with its row-wise Adagrad state."""
        return 4 * self.dim + 4

    @property
    def table_bytes(self) -> int:
        """Bytes of all tables with optimizer state."""
        return sum(self.tables.values()) * self.record_bytes


@dataclass
class Samples(Pipelineable):
    """A batch as TorchRec's pipelines and recpipe take it."""

    dense_features: torch.Tensor
    sparse_features: KeyedJaggedTensor
    labels: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Samples:
        return Samples(
            self.dense_features.to(device, non_blocking=non_blocking),
            self.sparse_features.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> Samples:
        return Samples(
            self.dense_features.pin_memory(), self.sparse_features.pin_memory(), self.labels.pin_memory()
        )

    def record_stream(self, stream: torch.Stream) -> None:
        for part in (self.dense_features, self.sparse_features, self.labels):
            part.record_stream(stream)


@cache
def _shares(rows: int) -> np.ndarray:
    shares = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -ZIPF)
    return shares / shares[-1]


_made: tuple[Size, list[Samples]] | None = None


def batches(size: Size, pinned: bool = False) -> list[Samples]:
    """The batches of a size, on a GPU machine in page-locked memory; those of the latest one are kept."""
    global _made
    if _made is None or (_made[0].batch, _made[0].steps, _made[0].tables) != (
        size.batch, size.steps, size.tables
    ):  # fmt: skip
        rng = np.random.default_rng(1)
        places = [rng.permutation(rows) for rows in size.tables.values()]
        drawn = (_batch(rng, size, places) for _ in range(size.steps))
        _made = size, [batch.pin_memory() if pinned else batch for batch in drawn]
    return _made[1]


def _batch(rng: np.random.Generator, size: Size, places: list[np.ndarray]) -> Samples:
    """Popular rows lie scattered over their table."""
    ids = np.concatenate(
        [place[np.searchsorted(_shares(len(place)), rng.random(size.batch))] for place in places]
    )
    return Samples(
        torch.from_numpy(rng.standard_normal((size.batch, DENSE), np.float32)),
        KeyedJaggedTensor(
            list(size.tables),
            torch.from_numpy(ids.astype(np.int64)),
            lengths=torch.ones(len(ids), dtype=torch.int64),
        ),
        torch.from_numpy((rng.random(size.batch) < 0.25).astype(np.float32)),
    )


def make_model(size: Size, dense_device: torch.device) -> DLRMTrain:
    """The model, whose tables have no memory yet."""
    torch.manual_seed(1)
    configs = [
        EmbeddingBagConfig(name=name, embedding_dim=size.dim, num_embeddings=rows, feature_names=[name])
        for name, rows in size.tables.items()
    ]
    collection = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    return DLRMTrain(
        DLRM(collection, DENSE, [512, 256, size.dim], [1024, 512, 256, 1], dense_device=dense_device)
    )
