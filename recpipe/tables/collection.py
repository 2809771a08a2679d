"""What collections of tables offer beyond looking rows up, and the FBGEMM tables that they are made of.

Each capability is a small interface. Core asks for one by ``TableCollection.offers`` and never checks a
collection's class, so that a collection around another one can keep the inner one's capabilities.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    BoundsCheckMode,
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from numpy.typing import NDArray
from torchrec.modules.embedding_configs import EmbeddingBagConfig, data_type_to_sparse_type
from torchrec.optim import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from recpipe import private_api
from recpipe.common.loops import ALONE, Spread
from recpipe.common.memory import untouched
from recpipe.common.meter import counting
from recpipe.errors import UserError
from recpipe.plugin.bags import RowIds
from recpipe.plugin.collection import TableCollection
from recpipe.plugin.tables import Region, TableSet, Values, row_chunks, to_numpy
from recpipe.tables.fused_update import has_loop
from recpipe.tables.loop_tables import STORAGES, LoopTables, LoopUpdates
from recpipe.tables.rows import evaluated, looked_up, table_bags
from recpipe.tables.updating import OwnUpdates

if TYPE_CHECKING:
    from recpipe.plugin.skipper import RowFilter

_TAKES_MEMORY = "preallocated_host_buffers" in signature(SplitTableBatchedEmbeddingBagsCodegen).parameters
"""Whether this release of FBGEMM uses memory that it is given; otherwise it writes zeros into its own."""
TORCHREC_OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rowwise_adagrad": RowWiseAdagrad,
}


class SavesPlacement(ABC):
    """A collection that saves which rows are resident in a checkpoint, from which a resumed run goes on."""

    @abstractmethod
    def placement_state(self) -> dict[str, Any]:
        """Which rows are resident and the policy's state, as tensors, arrays and plain values."""

    @abstractmethod
    def check_placement_state(self, state: Mapping[str, Any]) -> None:
        """``Damaged`` if ``state`` cannot be a result of ``placement_state``."""

    @abstractmethod
    def load_placement_state(self, state: dict[str, Any] | None) -> bool:
        """Continue from ``state``, before the tables are loaded. False if it is from another policy or
        budget."""


class SavedByRanks(ABC):
    """A collection of which every rank writes and reads its own part of a checkpoint's tables."""

    @abstractmethod
    def save_tables(self, directory: Path) -> None:
        """Write this rank's part into ``directory``, which rank 0 creates; all ranks call it."""

    @abstractmethod
    def load_tables(self, directory: Path) -> None:
        """Read this rank's part of tables that were saved by any number of ranks."""


class ShowsRows(ABC):
    """A collection that shows, between two batches, which rows are resident and what their weights are."""

    slots: int
    """How many rows can be resident."""

    @property
    @abstractmethod
    def resident_count(self) -> int:
        """How many rows are resident."""

    @abstractmethod
    def resident_rows(self) -> RowIds:
        """The resident rows, sorted, int64 [n]."""

    @abstractmethod
    def resident_weights(self, rows: RowIds) -> torch.Tensor:
        """A copy of the weights of distinct resident ``rows`` after the last batch, float32 [n, D]."""


class ReadsRows(ABC):
    """A collection that reads the weights of single rows between two batches."""

    @abstractmethod
    def weights_of(self, rows: RowIds) -> NDArray[np.float32]:
        """A copy of the weights of distinct, ascending ``rows`` of the group after the last step, float32 [n,
        D]; all ranks call it with the same rows."""


class RowCollection(TableCollection, ReadsRows):
    """A collection that reads and writes any row of any table by its number in ``tables``."""

    replicated = False
    """Whether other trainers hold replicas of its rows, which must stay equal."""
    row_filter: RowFilter | None = None
    """The filter that leaves rows out of updates; None: no rows are left out."""

    def __init__(self, tables: TableSet) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, sparse: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled rows by feature name; float32, each [B, D]."""
        return self.keyed(self.lookup(sparse))

    def keyed(self, pooled: torch.Tensor) -> KeyedTensor:
        """Convert ``pooled`` (float32 [B, F * D], features in the tables' order) into what TorchRec
        returns."""
        names = list(self.tables.features)
        return KeyedTensor(names, [self.tables.dim] * len(names), pooled)

    def records_of(self, rows: RowIds) -> torch.Tensor:
        """A copy of the records of distinct ``rows`` after the last step, float32 [n, width]."""
        raise UserError(f"{type(self).__name__} looks up no ids but the batch's own")

    def weights_of(self, rows: RowIds) -> NDArray[np.float32]:
        return to_numpy(self.records_of(rows)[:, : self.tables.dim])

    def replace_records(self, rows: RowIds, records: torch.Tensor) -> None:
        """Replace the records of distinct ``rows`` by ``records`` (float32 [n, width])."""
        raise UserError(f"{type(self).__name__} looks up no ids but the batch's own")

    def read(self, region: Region) -> Values:
        records = to_numpy(self.records_of(self.rows_of(region)))
        return records[:, : self.tables.dim], records[:, self.tables.dim :]

    def write(self, region: Region, values: Values) -> None:
        self.replace_records(self.rows_of(region), torch.from_numpy(np.concatenate(values, axis=1)))

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self.tables.configs()

    def is_weighted(self) -> bool:
        """Whether lookups have a weight for each id."""
        return self.tables.weighted

    def regions(self) -> Iterator[Region]:
        """All rows of all tables, in chunks."""
        yield from row_chunks(self.tables)

    def fill_first_values(self) -> None:
        """Initialize all rows, which are 0 so far."""
        with counting("filling the tables' rows", self.tables.layout.total_rows) as add:
            for region in self.regions():
                records = self.tables.fill(region.table, region.start, region.stop)
                if records.view(np.uint32).any():  # memory that nobody has written takes none, and is 0
                    self.write(region, (records[:, : self.tables.dim], records[:, self.tables.dim :]))
                add(region.stop - region.start)

    def rows_of(self, region: Region) -> NDArray[np.int64]:
        """Numbers of the rows of ``region``, int64 [rows]."""
        layout = self.tables.layout
        base = int(layout.bases[layout.tables.index(region.table)])
        return np.arange(base + region.start, base + region.stop, dtype=np.int64)


class AllResident(RowCollection, ShowsRows):
    """A collection with all of its rows in memory."""

    def __init__(self, tables: TableSet) -> None:
        super().__init__(tables)
        self.slots = tables.layout.total_rows

    @property
    def resident_count(self) -> int:
        return self.slots

    def resident_rows(self) -> RowIds:
        return np.arange(self.slots)

    def resident_weights(self, rows: RowIds) -> torch.Tensor:
        return self.records_of(rows)[:, : self.tables.dim]


def read_rows_of(
    collection: RowCollection, sparse: KeyedJaggedTensor, spread: Spread = ALONE
) -> torch.Tensor:
    """The current rows for ``sparse`` in the form of ``lookup``, as evaluations take them; without
    gradient."""
    bags = table_bags(collection.tables, sparse, spread)
    distinct, which = np.unique(bags.rows, return_inverse=True)
    weights = evaluated(collection.tables, collection.records_of(distinct))
    return looked_up(collection.tables, weights, which, bags)


def make_tbe(tables: TableSet, rows: int, device: torch.device) -> SplitTableBatchedEmbeddingBagsCodegen:
    """One TBE of ``rows`` slots that all features share; a slot holds a row of any table.

    Rows that are not pooled are looked up as bags of at most one id, of one feature.
    """
    if not tables.pooled:
        return fused_tbe(tables, [rows], [0], device, pooled=True)
    tbe = fused_tbe(tables, [rows], [0] * len(tables.features), device, pooled=True)
    private_api.update_by_table(tbe, rows, tables.table_of)
    if isinstance(tbe, LoopTables | LoopUpdates):
        tbe.loops.table_of = tables.table_of
    return tbe


def bounds_check(device: torch.device) -> BoundsCheckMode:
    """What FBGEMM does about an index that is not in its table.

    The loaders have checked the ids and raised an error, so that only a mistake of recpipe or of a plugin can
    lead to one. On a CPU nothing is done, since a check would slow every lookup down. On a GPU the update
    would change foreign memory unnoticed, and the check is one short kernel: the run ends there.
    """
    return BoundsCheckMode.FATAL if device.type == "cuda" else BoundsCheckMode.NONE


def fused_tbe(
    tables: TableSet, rows: Sequence[int], table_of: Sequence[int], device: torch.device, pooled: bool
) -> SplitTableBatchedEmbeddingBagsCodegen:
    """A TBE of physical tables with so many ``rows`` of the set's dimension, whose backward pass makes the
    optimizer's step.

    Feature i looks up in physical table ``table_of[i]``; rows come summed by bag, or one for each id.
    """
    on_gpu = device.type == "cuda"
    location = EmbeddingLocation.DEVICE if on_gpu else EmbeddingLocation.HOST
    compute = ComputeDevice.CUDA if on_gpu else ComputeDevice.CPU
    shape: dict[str, Any] = {
        "embedding_specs": [(count, tables.dim, location, compute) for count in rows],
        "feature_table_map": list(table_of),
        "pooling_mode": PoolingMode.SUM if pooled else PoolingMode.NONE,
        "weights_precision": data_type_to_sparse_type(tables.storage),
        "output_dtype": SparseType.FP32,
        "bounds_check_mode": bounds_check(device),
        "device": device,
    }
    if device.type == "cpu" and _TAKES_MEMORY:
        shape["preallocated_host_buffers"] = _memory(tables, sum(rows))
    own = tables.optimizer
    if own.fused:
        shape |= {"optimizer": own.kind, "learning_rate": own.lr, "eps": own.eps}
        shape["stochastic_rounding"] = own.stochastic_rounding
    by_loops = pooled and not on_gpu and tables.storage in STORAGES and has_loop(own)
    if not own.fused:
        made = LoopUpdates(tables, table_of, **shape) if by_loops else OwnUpdates(own, table_of, **shape)
    elif by_loops:
        made = LoopTables(tables, table_of, **shape)
    else:
        made = SplitTableBatchedEmbeddingBagsCodegen(**shape)
    tables.optimizer.rate.follow(made)
    return made


def _memory(tables: TableSet, rows: int) -> dict[str, torch.Tensor]:
    """Memory for so many rows of ``tables`` on a CPU: of those that nobody has written it takes none."""
    own = tables.optimizer
    made = {"weights": untouched((rows * tables.dim,), data_type_to_sparse_type(tables.storage).as_dtype())}
    if own.fused and own.state_width(tables.dim):
        made["momentum1"] = untouched((rows * own.state_width(tables.dim),), torch.float32)
    return made
