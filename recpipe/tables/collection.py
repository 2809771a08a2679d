"""The interface of every collection of tables, whatever tier its rows are in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

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
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, data_type_to_sparse_type
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.optim import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from recpipe import seams
from recpipe.common.meter import counting
from recpipe.errors import UserError
from recpipe.plugin.policy import RowIds
from recpipe.tables.capabilities import Rows, ShowsRows
from recpipe.tables.specs import Region, TableSet, Values, row_chunks
from recpipe.tables.stores.base import IoCounters
from recpipe.tables.tiers.store_thread import TierTimes

if TYPE_CHECKING:
    from recpipe.tables.skipping import RowFilter

C = TypeVar("C")
TORCHREC_OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rowwise_adagrad": RowWiseAdagrad,
}


@dataclass(frozen=True)
class TierFigures:
    """What a collection over tiers did during training, and the memory that it takes on this rank."""

    io: IoCounters
    times: TierTimes
    direct: bool | None
    """How its store does I/O; see ``ColdStore.direct``."""
    resident_bytes: int
    cold_bytes: int
    overhead_bytes: int
    cold_start: bool
    """Whether its cache was never full: what was measured is how it fills."""
    lookups: int | None = None
    """How many ids training has looked up; None if that and ``hits`` are not counted."""
    hits: int | None = None
    """Those whose row was resident before any row moved for their batch."""

    def plus(self, other: TierFigures) -> TierFigures:
        """The figures of both together. Seconds are summed, although both stores may have worked at the same
        time."""
        return TierFigures(
            self.io.plus(other.io),
            self.times.plus(other.times),
            self.direct if self.direct == other.direct else None,
            self.resident_bytes + other.resident_bytes,
            self.cold_bytes + other.cold_bytes,
            self.overhead_bytes + other.overhead_bytes,
            self.cold_start and other.cold_start,
            None if self.lookups is None or other.lookups is None else self.lookups + other.lookups,
            None if self.hits is None or other.hits is None else self.hits + other.hits,
        )


class TableCollection(ABC, nn.Module):
    """A module with the interface of TorchRec's ``EmbeddingBagCollection``. Every row can be read and written
    together with its optimizer state, for checkpoints, exports and comparisons.

    Training calls ``lookup``, whose result has no names and, for tables that are not pooled, one row for each
    id. Its backward pass updates the tables.

    If several ranks train, all trainers make the same calls in the same order.
    """

    whole_updates = "it does not override filter_updates()"
    """Why its updates cannot leave rows out, if they cannot."""

    @abstractmethod
    def regions(self) -> Iterator[Region]:
        """The regions that this process owns; all ranks together own all tables."""

    @abstractmethod
    def read(self, region: Region) -> Values:
        """Current weights and optimizer state of ``region``."""

    @abstractmethod
    def write(self, region: Region, values: Values) -> None:
        """Replace the weights and optimizer state of ``region``."""

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """As TorchRec's collection."""
        raise NotImplementedError(f"{type(self).__name__} looks no rows up for a model")

    def lookup(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        """Pooled rows float32 [B, F * D], or float32 [L, D] with one row for each id if rows are not pooled.
        ``sparse`` and the result have the features in the tables' order."""
        return self.joined(self(sparse))

    def joined(self, found: Rows) -> torch.Tensor:
        """The result of ``forward`` in the form of ``lookup``, with the features in the tables' order."""
        configs = self.embedding_bag_configs()
        names = [name for names in get_embedding_names_by_table(configs) for name in names]
        if not isinstance(found, KeyedTensor):
            return torch.cat([found[name].values() for name in names])
        values: torch.Tensor = found.values()
        if found.keys() in (names, [name for config in configs for name in config.feature_names]):
            return values
        by_name = found.to_dict()
        return torch.cat([by_name[name] for name in names], dim=1)

    def offers(self, capability: type[C]) -> C | None:
        """This collection as one with ``capability`` (see ``recpipe.tables.capabilities``), or None."""
        return self if isinstance(self, capability) else None

    def pooled_with_room(self, sparse: KeyedJaggedTensor) -> torch.Tensor | None:
        """Pooled rows with room for one more feature in front: float32 [B, (1 + F) * D], of which the first D
        columns are zero. None if that would take a copy."""
        return None

    @property
    def threads(self) -> int:
        """How many threads a lookup runs in."""
        return 1

    @property
    def collectives(self) -> Mapping[str, seams.Collective]:
        """TorchRec's collectives on this rank; empty if tables are not sharded."""
        return {}

    def update(self) -> None:
        """Update the tables that the backward pass has not updated; called after it."""

    def filter_updates(self, rows: RowFilter) -> None:
        """From now on update only the rows that ``rows`` keeps; called once, before any lookup."""
        raise UserError(
            f"a plugin leaves rows out of updates, which {type(self).__name__} cannot do: "
            f"{self.whole_updates}. Drop that plugin, or the one that brings these tables"
        )

    def tier_figures(self) -> TierFigures | None:
        """What it moved between its tiers; None if all rows are resident."""
        return None

    def serve(self) -> None:
        """On a rank that holds rows and does not train: answer the trainers until they are done."""
        raise NotImplementedError(f"{type(self).__name__} does not run on ranks that only hold rows")

    def write_back(self) -> None:
        """Write what is only here to the cold tier, and wait until it is as durable as that can make it; the
        tables stay usable. All trainers call it."""

    def close(self) -> None:
        """Write back what is only in device memory and release files and threads. The tables cannot be used
        afterwards."""


class RowCollection(TableCollection):
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

    def replace_records(self, rows: RowIds, records: torch.Tensor) -> None:
        """Replace the records of distinct ``rows`` by ``records`` (float32 [n, width])."""
        raise UserError(f"{type(self).__name__} looks up no ids but the batch's own")

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """As TorchRec's collection."""
        return self.tables.configs()

    def is_weighted(self) -> bool:
        """As TorchRec's collection."""
        return self.tables.weighted

    def regions(self) -> Iterator[Region]:
        """All rows of all tables, in chunks."""
        yield from row_chunks(self.tables)

    def fill_first_values(self) -> None:
        """Initialize all rows."""
        with counting("filling the tables' rows", self.tables.layout.total_rows) as add:
            for region in self.regions():
                records = self.tables.fill(region.table, region.start, region.stop)
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
        """All rows."""
        return self.slots

    def resident_rows(self) -> RowIds:
        """All rows."""
        return np.arange(self.slots)

    def resident_weights(self, rows: RowIds) -> torch.Tensor:
        """Weights of distinct ``rows``."""
        return self.records_of(rows)[:, : self.tables.dim]


def make_tbe(tables: TableSet, rows: int, device: torch.device) -> SplitTableBatchedEmbeddingBagsCodegen:
    """One TBE of ``rows`` slots that all features share; a slot holds a row of any table.

    Rows that are not pooled are looked up as bags of at most one id, of one feature.
    """
    if not tables.pooled:
        return fused_tbe(tables, [rows], [0], device, pooled=True)
    tbe = fused_tbe(tables, [rows], [0] * len(tables.features), device, pooled=True)
    seams.update_by_table(tbe, rows, tables.table_of)
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
    """A TBE of physical tables with so many ``rows`` of the set's dimension, and its fused optimizer.

    Feature i looks up in physical table ``table_of[i]``; rows come summed by bag, or one for each id.
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
        pooling_mode=PoolingMode.SUM if pooled else PoolingMode.NONE,
        weights_precision=data_type_to_sparse_type(tables.storage),
        output_dtype=SparseType.FP32,
        stochastic_rounding=tables.optimizer.stochastic_rounding,
        bounds_check_mode=bounds_check(device),
        device=device,
    )
