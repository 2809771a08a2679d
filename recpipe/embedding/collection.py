"""What every collection of tables offers to the rest of recpipe, whatever tier its rows live in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    BoundsCheckMode,
    EmbeddingLocation,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from numpy.typing import NDArray
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.optim import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from recpipe.embedding import seams
from recpipe.embedding.store_thread import TierTimes
from recpipe.embedding.stores.base import IoCounters
from recpipe.embedding.tables import Region, TableSet, Values, row_chunks

C = TypeVar("C")
TORCHREC_OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rowwise_adagrad": RowWiseAdagrad,
}


@dataclass(frozen=True)
class TierFigures:
    """What a collection over tiers did while training, and the memory that it takes on this rank."""

    io: IoCounters
    times: TierTimes
    direct: bool | None
    """How its store does I/O, as in ``ColdStore.direct``."""
    resident_bytes: int
    cold_bytes: int
    overhead_bytes: int


class TableCollection(ABC, nn.Module):
    """A module with the interface of TorchRec's ``EmbeddingBagCollection`` whose every row can be read and
    written with its optimizer state: for checkpoints, exports and comparisons.

    Where several ranks train, all trainers make the same calls in the same order.
    """

    @abstractmethod
    def regions(self) -> Iterator[Region]:
        """The regions that this process owns; together (over all ranks) they are all tables."""

    @abstractmethod
    def read(self, region: Region) -> Values:
        """Current weights and optimizer state of ``region``."""

    @abstractmethod
    def write(self, region: Region, values: Values) -> None:
        """Replace the weights and optimizer state of ``region``."""

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """As TorchRec's collection."""
        raise NotImplementedError(f"{type(self).__name__} looks no rows up for a model")

    def offers(self, capability: type[C]) -> C | None:
        """This collection as one with ``capability`` (see ``recpipe.embedding.capabilities``), or None."""
        return self if isinstance(self, capability) else None

    def pooled_with_room(self, sparse: KeyedJaggedTensor) -> torch.Tensor | None:
        """Pooled rows as ``forward`` gives them, with room for one more feature in front, float32
        [B, (1 + F) * D] whose first D columns are zero; None where that would take a copy."""
        return None

    @property
    def threads(self) -> int:
        """How many threads a lookup runs in."""
        return 1

    @property
    def collectives(self) -> Mapping[str, seams.Collective]:
        """TorchRec's collectives on this rank; none where tables are not sharded."""
        return {}

    def update(self) -> None:
        """The step of tables that their backward pass does not update; called after it."""

    def tier_figures(self) -> TierFigures | None:
        """What it moved between its tiers; None where all rows are resident."""
        return None

    def serve(self) -> None:
        """On a rank that holds rows and does not train: answer the trainers until they are done."""
        raise NotImplementedError(f"{type(self).__name__} does not run on ranks that only hold rows")

    def close(self) -> None:
        """Write back what is only here and release files and threads; the tables are unusable then."""


class RowCollection(TableCollection):
    """A collection that reads and writes any row of any table by its global number."""

    def __init__(self, tables: TableSet) -> None:
        super().__init__()
        self.tables = tables

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """As TorchRec's collection."""
        return self.tables.configs()

    def is_weighted(self) -> bool:
        """As TorchRec's collection; weighted bags are not supported."""
        return False

    def regions(self) -> Iterator[Region]:
        """All rows of all tables, in chunks."""
        yield from row_chunks(self.tables.features, self.tables.dim)

    def fill_first_values(self) -> None:
        """Give all rows their first values."""
        for region in self.regions():
            records = self.tables.fill(region.table, region.start, region.stop)
            self.write(region, (records[:, : self.tables.dim], records[:, self.tables.dim :]))

    def rows_of(self, region: Region) -> NDArray[np.int64]:
        """Global numbers of the rows of ``region``, int64 [rows]."""
        layout = self.tables.layout
        base = int(layout.bases[layout.tables.index(region.table)])
        return np.arange(base + region.start, base + region.stop, dtype=np.int64)

    def keyed(self, pooled: torch.Tensor) -> KeyedTensor:
        """``pooled`` (float32 [B, F * D], features in the tables' order) as TorchRec returns it."""
        names = [f.name for f in self.tables.features]
        return KeyedTensor(names, [self.tables.dim] * len(names), pooled)


def make_tbe(tables: TableSet, rows: int, device: torch.device) -> SplitTableBatchedEmbeddingBagsCodegen:
    """One TBE of ``rows`` slots that all features share; a slot holds a row of any table."""
    tbe = fused_tbe(tables, [rows], [0] * len(tables.features), device)
    seams.update_by_feature(tbe, rows)
    return tbe


def fused_tbe(
    tables: TableSet, rows: Sequence[int], table_of: Sequence[int], device: torch.device
) -> SplitTableBatchedEmbeddingBagsCodegen:
    """A TBE of physical tables with so many ``rows`` of the set's dimension, and its fused optimizer.

    Feature i looks up in physical table ``table_of[i]``.
    """
    on_gpu = device.type == "cuda"
    location = EmbeddingLocation.DEVICE if on_gpu else EmbeddingLocation.HOST
    compute = ComputeDevice.CUDA if on_gpu else ComputeDevice.CPU
    return SplitTableBatchedEmbeddingBagsCodegen(
        [(count, tables.dim, location, compute) for count in rows],
        feature_table_map=list(table_of),
        optimizer=tables.optimizer.kind,
        learning_rate=tables.optimizer.lr,
        eps=tables.optimizer.eps,
        # The loaders have checked the ids, and would tell; FBGEMM would look up row 0 instead.
        bounds_check_mode=BoundsCheckMode.NONE,
        device=device,
    )
