"""The work of all sides: a DLRM of TorchRec's, tables like Criteo's with its skew, batches in host memory; or
MLPerf Training's DLRM-DCNv2, whose largest tables are cut."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise

import numpy as np
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRMTrain
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
CUT = 4_000_000
"""Most rows of a table of MLPerf's: all of them have 24 million then, an eighth of the benchmark's, which is
what each of eight GPUs holds."""
MLPERF_ROWS = (
    *(40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10, 2209, 11938),
    *(155, 4, 976, 14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36),
)
"""Rows of DLRM-DCNv2's tables in MLPerf Training v3.0 and later."""
MLPERF_HOT = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
"""Ids of each feature, of its synthetic multi-hot data."""
CROSSES, RANK = 3, 512
ZIPF = 1.12
"""The r-th most popular row of a table is drawn in proportion to r^-ZIPF."""
EPSILON = 1e-8


@dataclass(frozen=True)
class Size:
    """What a run trains: width of rows, samples of a batch, number of batches, a divisor of all tables' rows
    for a try, ``model.precision`` (float32, tf32 or bfloat16), and whether it is MLPerf's model."""

    dim: int
    batch: int
    steps: int
    smaller: int = 1
    precision: str = "float32"
    mlperf: bool = False

    @property
    def rate(self) -> float:
        """The learning rate; wide layers of crosses grow without bound by the larger one."""
        return 0.0005 if self.mlperf else 0.02

    @property
    def tables(self) -> dict[str, int]:
        """Rows of each feature's table."""
        rows = [min(CUT, own) for own in MLPERF_ROWS] if self.mlperf else ROWS
        return {f"C{n}": max(3, own // self.smaller) for n, own in enumerate(rows, 1)}

    @property
    def hot(self) -> tuple[int, ...]:
        """Ids of each feature in a sample."""
        return MLPERF_HOT if self.mlperf else (1,) * len(ROWS)

    @property
    def layers(self) -> tuple[list[int], list[int]]:
        """Outputs of the layers before the vectors meet, and after that."""
        if self.mlperf:
            return [512, 256, self.dim], [1024, 1024, 512, 256, 1]
        return [512, 256, self.dim], [1024, 512, 256, 1]

    @property
    def flops(self) -> int:
        """Operations of a sample's matrix products: two a weight forward, four backward, but for the first
        layer, whose inputs need no gradient."""
        bottom, top = self.layers
        vectors = 1 + len(ROWS)
        crossed = vectors * self.dim if self.mlperf else self.dim + vectors * (vectors - 1) // 2
        weights = sum(a * b for layers in ([DENSE, *bottom], [crossed, *top]) for a, b in pairwise(layers))
        within = 2 * CROSSES * crossed * RANK if self.mlperf else vectors * vectors * self.dim
        return 6 * (weights + within) - 2 * DENSE * bottom[0]

    @property
    def row_bytes(self) -> int:
        """Bytes that a sample's rows take if none is in a cache: read forward, read and written for the
        update, with their state."""
        return sum(self.hot) * (4 * self.dim + 2 * self.record_bytes)

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
        if self.labels.is_cuda:  # the pipelines ask for it on a CPU too, whose streams are none
            for part in (self.dense_features, self.sparse_features, self.labels):
                part.record_stream(stream)


@cache
def _shares(rows: int) -> np.ndarray:
    shares = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -ZIPF)
    return shares / shares[-1]


_made: dict[tuple[int, int, int, bool], list[Samples]] = {}


def batches(size: Size, pinned: bool = False) -> list[Samples]:
    """The batches of a size, on a GPU machine in page-locked memory. They are made once for all widths."""
    key = (size.batch, size.steps, size.smaller, size.mlperf)
    if key not in _made:
        _made.clear()  # host memory holds those of one kind
        places = [np.random.default_rng(1).permutation(rows) for rows in size.tables.values()]
        for rows in size.tables.values():
            _shares(rows)
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
            drawn = list(threads.map(partial(_batch, size, places), range(size.steps)))
        _made[key] = [batch.pin_memory() if pinned else batch for batch in drawn]
    return _made[key]


def _batch(size: Size, places: list[np.ndarray], number: int) -> Samples:
    """Popular rows lie scattered over their table."""
    rng = np.random.default_rng([1, number])
    ids = np.concatenate(
        [
            place[np.searchsorted(_shares(len(place)), rng.random(size.batch * hot))]
            for place, hot in zip(places, size.hot, strict=True)
        ]
    )
    return Samples(
        torch.from_numpy(rng.standard_normal((size.batch, DENSE), np.float32)),
        KeyedJaggedTensor(
            list(size.tables),
            torch.from_numpy(ids.astype(np.int64)),
            lengths=torch.tensor(size.hot).repeat_interleave(size.batch),
        ),
        torch.from_numpy((rng.random(size.batch) < 0.25).astype(np.float32)),
    )


@cache
def _block(dim: int) -> torch.Tensor:
    return torch.empty(1 << 16, dim).uniform_(-1e-3, 1e-3, generator=torch.Generator().manual_seed(1))


def first_rows(weights: torch.Tensor) -> None:
    """First values that cost no more than a copy: recpipe makes those of a table on the CPU, TorchRec on the
    GPU, and neither is measured."""
    block, rows = _block(weights.shape[1]), len(weights)
    with torch.no_grad():
        for start in range(0, rows, len(block)):
            weights[start : start + len(block)].copy_(block[: rows - start])


def make_model(size: Size) -> DLRMTrain:
    """The model, its dense part on the CPU; its tables have no memory yet."""
    torch.manual_seed(1)
    configs = [
        EmbeddingBagConfig(
            name=name, embedding_dim=size.dim, num_embeddings=rows, feature_names=[name], init_fn=first_rows
        )
        for name, rows in size.tables.items()
    ]
    collection = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    cpu = torch.device("cpu")
    if size.mlperf:
        return DLRMTrain(DLRM_DCN(collection, DENSE, *size.layers, CROSSES, RANK, dense_device=cpu))
    return DLRMTrain(DLRM(collection, DENSE, *size.layers, dense_device=cpu))


def tbes(modules: Iterable[nn.Module]) -> list[SplitTableBatchedEmbeddingBagsCodegen]:
    """FBGEMM's tables in ``modules``, each once. TorchRec's sharded collections keep them in a plain list,
    which ``modules()`` does not enter."""
    found: dict[int, SplitTableBatchedEmbeddingBagsCodegen] = {}
    for part in (part for module in modules for part in module.modules()):
        listed = getattr(part, "_lookups", None)
        inner = tbes(listed) if isinstance(listed, list) else []
        own = [part] if isinstance(part, SplitTableBatchedEmbeddingBagsCodegen) else []
        found |= {id(tbe): tbe for tbe in (*own, *inner)}
    return list(found.values())


def device_bytes(modules: Iterable[nn.Module]) -> int:
    """Memory of the GPU that FBGEMM's tables in ``modules`` hold: rows, optimizer state and all that a cache
    keeps beside its rows. Rows in host memory that a GPU can read are not counted."""
    held = 0
    for tbe in tbes(modules):
        for tensor in (*tbe.parameters(), *tbe.buffers()):
            if tensor.is_cuda and not (tensor.numel() and torch.ops.fbgemm.is_uvm_tensor(tensor)):
                held += tensor.numel() * tensor.element_size()
    return held
