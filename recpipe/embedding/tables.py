"""Embedding tables as the recipe states them: rows, dimension, optimizer, and their first values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import quote

import numpy as np
import torch
from annotated_types import Gt
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from numpy.typing import NDArray
from torch import nn
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig

from recpipe.data.dataset import SparseFeature
from recpipe.embedding.stores.base import Records, StoreLayout
from recpipe.validation import one_of

FILL_ROWS = 65_536
"""Rows per seed of the initial values: any chunking of a table yields the same rows."""
_TAKEN = frozenset(dir(nn.ModuleDict()))

OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}


@dataclass(frozen=True)
class TableOptimizer:
    """The optimizer that FBGEMM fuses into the tables' backward pass."""

    name: Annotated[str, one_of(*OPTIMIZERS)]
    lr: Annotated[float, Gt(0)]
    eps: Annotated[float, Gt(0)] = 1e-8

    @property
    def kind(self) -> EmbOptimType:
        """FBGEMM's name of this optimizer."""
        return OPTIMIZERS[self.name]

    @property
    def knobs(self) -> dict[str, float]:
        """Arguments of the same optimizer in ``torch.optim`` and ``torchrec.optim``."""
        return {"lr": self.lr} if self.name == "sgd" else {"lr": self.lr, "eps": self.eps}

    def state_width(self, dim: int) -> int:
        """float32 values of optimizer state per row: 0 (SGD), 1 (row-wise Adagrad) or ``dim`` (Adagrad)."""
        return {"sgd": 0, "rowwise_adagrad": 1, "adagrad": dim}[self.name]


@dataclass(frozen=True)
class TableSet:
    """All tables of one model: they share ``dim`` and the optimizer, so that a record has one width."""

    features: tuple[SparseFeature, ...]
    dim: int
    optimizer: TableOptimizer
    seed: int

    @property
    def layout(self) -> StoreLayout:
        """Global row numbers and the record's width (weights, then optimizer state)."""
        width = self.dim + self.optimizer.state_width(self.dim)
        return StoreLayout(tuple(f.name for f in self.features), tuple(f.rows for f in self.features), width)

    @property
    def record_bytes(self) -> int:
        """Bytes of one row: float32 weights and optimizer state."""
        return 4 * self.layout.width

    @property
    def total_bytes(self) -> int:
        """Bytes of all rows of all tables, optimizer state included."""
        return self.layout.total_rows * self.record_bytes

    def shapes(self) -> dict[str, tuple[int, int, int]]:
        """Per table: rows, dimension, width of the optimizer state."""
        return {f.name: (f.rows, self.dim, self.layout.width - self.dim) for f in self.features}

    def configs(self, data_types: Mapping[str, DataType] | None = None) -> list[EmbeddingBagConfig]:
        """TorchRec's description of the tables (float32 but for ``data_types``), named as its feature."""
        types = data_types or {}
        return [
            EmbeddingBagConfig(
                name=f.name,
                embedding_dim=self.dim,
                num_embeddings=f.rows,
                feature_names=[f.name],
                data_type=types.get(f.name, DataType.FP32),
            )
            for f in self.features
        ]

    def fill(self, table: str, start: int, stop: int) -> Records:
        """First records of rows [start, stop): uniform in +-sqrt(1 / rows) as in DLRM, state zero.

        Depends on (seed, table, row) alone, not on how the rows are asked for. float32 [stop - start, width].
        """
        names = [f.name for f in self.features]
        index = names.index(table)
        bound = float(np.sqrt(1.0 / self.features[index].rows))
        out = np.zeros((stop - start, self.layout.width), np.float32)
        for chunk in range(start // FILL_ROWS, -(-stop // FILL_ROWS)):
            first = chunk * FILL_ROWS
            rows = min(FILL_ROWS, self.features[index].rows - first)
            rng = np.random.Generator(np.random.Philox(key=[self.seed, (index << 40) + chunk]))
            values = rng.random((rows, self.dim), np.float32) * (2 * bound) - bound
            lo, hi = max(start, first), min(stop, first + rows)
            out[lo - start : hi - start, : self.dim] = values[lo - first : hi - first]
        return out


def module_name(table: str) -> str:
    """``table`` as the name of a module, by which TorchRec's planner and sharded collection know a table.

    The name itself, but for what no module may be called: a dot, nothing, an attribute of ``ModuleDict``.
    Percent-encoded, so that different tables have different names.
    """
    safe = quote(table, safe="").replace(".", "%2E")
    if safe in _TAKEN:
        return f"%{ord(safe[0]):02X}{safe[1:]}"
    return safe or "%"


@dataclass(frozen=True)
class Region:
    """Rows [start, stop) and columns [left, right) of one table: the unit of saving and loading."""

    table: str
    start: int
    stop: int
    left: int
    right: int


Values = tuple[NDArray[np.float32], NDArray[np.float32]]
"""Weights float32 [rows, columns] and optimizer state float32 [rows, S] of a region."""


def row_chunks(features: Sequence[SparseFeature], dim: int) -> list[Region]:
    """All rows of all tables, in regions small enough to copy."""
    return [
        Region(f.name, start, min(start + FILL_ROWS, f.rows), 0, dim)
        for f in features
        for start in range(0, f.rows, FILL_ROWS)
    ]


def to_numpy(tensor: torch.Tensor) -> NDArray[np.float32]:
    """A float32 array in host memory; shares memory where the tensor is already there."""
    array: NDArray[np.float32] = tensor.detach().to("cpu", torch.float32).numpy()
    return array
