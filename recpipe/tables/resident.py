"""All rows in device memory, in FBGEMM's TBEs, which are called directly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe import private_api
from recpipe.common.device import keep_to_one_core
from recpipe.data.parts import in_order
from recpipe.plugin.bags import RowIds
from recpipe.plugin.skipper import RowFilter
from recpipe.plugin.tables import Region, Table, TableSet, Values, to_numpy
from recpipe.tables.collection import AllResident, fused_tbe
from recpipe.tables.group_rows import GroupRows, GroupTables
from recpipe.tables.skipping import by_feature, filter_lookups

T = TypeVar("T")


class ResidentCollection(AllResident, GroupTables):
    """All tables in TBEs with a fused optimizer; ``TableSet.fill`` gives the first values.

    FBGEMM's CPU kernels run in the thread that calls them. With ``groups`` above 1, neighbouring tables are
    put together into so many TBEs, each driven by its own thread. Joining their outputs costs a copy, so this
    pays only if bags hold many ids. On a GPU, ``groups`` above 1 is a ValueError: autograd has one thread for
    a GPU, which would wait for itself. ``room``: whether pooled rows may be asked for with room in front. If
    it is then not asked for, removing it costs a copy of the gradient.
    """

    def __init__(self, tables: TableSet, device: torch.device, groups: int = 1, room: bool = True) -> None:
        if groups > 1 and device.type != "cpu":
            raise ValueError(f"{groups} groups on {device}: only on a CPU can a lookup have several TBEs")
        super().__init__(tables)
        self.device = device
        # The first table is never looked up: its empty bags are the room for the dense vector.
        bare = tables.pooled and not tables.weighted
        self._sums_on_cpu = tables.pooled and device.type == "cpu"
        self._padded = room and groups == 1 and device.type == "cpu" and bare
        ahead = [1] if self._padded else []
        cuts = [len(tables.tables) * group // groups for group in range(groups + 1)]
        parts = [tables.tables[a:b] for a, b in pairwise(cuts)]
        ends = np.cumsum([0, *(len(table.features) for part in parts for table in part)])
        self._cuts = ends[cuts].tolist()
        self.tbes = nn.ModuleList(_tbe(tables, part, ahead, device) for part in parts)
        views = [view for tbe in self.tbes for view in private_api.tbe_views(tbe)][len(ahead) :]
        self._storage = dict(zip(tables.layout.tables, views, strict=True))
        # One core for each thread: FBGEMM's update would otherwise enter a parallel region for every table.
        self._threads = ThreadPoolExecutor(groups, "recpipe-tbe", keep_to_one_core) if groups > 1 else None
        self._offsets = torch.empty(0), torch.empty(0)
        self._anchor = torch.zeros(0, device=device, requires_grad=True)
        self.fill_first_values()

    def filter_updates(self, rows: RowFilter) -> None:
        """Leave rows out of the TBEs' updates."""
        self.row_filter = rows
        bases = self.tables.layout.bases[self.tables.table_of]
        for tbe, (first, last) in zip(self.tbes, pairwise(self._cuts), strict=True):
            own = bases[first:last]
            if self._padded:
                own = np.append(0, own)  # without the table that is never looked up
            filter_lookups(tbe, rows, by_feature(own), len(own), self.tables.pooled)

    def lookup(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        """Pooled rows float32 [B, F * D], or rows float32 [L, D]."""
        if self._padded:
            return self._looked_up(sparse)[:, self.tables.dim :]
        if self._threads is None:
            return self._looked_up(sparse)
        sparse = in_order(sparse, self.tables.features)
        rows: torch.Tensor = _Grouped.apply(self._anchor, self, sparse)  # type: ignore[no-untyped-call]
        return rows

    def compute(self, rows: GroupRows, warm: bool, cold: bool) -> tuple[torch.Tensor, None]:
        """All rows; with padding, which is the first table's, if the batch wants it."""
        if self._padded and rows.wants_padding:
            rows.padding = self.tables.dim
            return self._looked_up(rows.ids), None
        return self.lookup(rows.ids), None

    def pooled_with_room(self, sparse: KeyedJaggedTensor) -> torch.Tensor | None:
        """The TBE's output without a copy; None with several TBEs or on a GPU."""
        return self._looked_up(sparse) if self._padded else None

    @property
    def threads(self) -> int:
        """One thread for each group."""
        return len(self.tbes)

    def _looked_up(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        sparse = in_order(sparse, self.tables.features)
        offsets = sparse.offsets()
        if self._padded:  # preceded by the first table's empty bags; one-hot batches share the result
            if self._offsets[0] is not offsets:
                self._offsets = offsets, torch.cat((offsets.new_zeros(sparse.stride()), offsets))
            offsets = self._offsets[1]
        weights = sparse.weights().float() if self.tables.weighted else None
        tbe, inputs = self.tbes[0], (sparse.values().long(), offsets.long(), weights)
        if self._sums_on_cpu and not torch.is_grad_enabled():
            assert isinstance(tbe, SplitTableBatchedEmbeddingBagsCodegen)
            return private_api.look_up_only(tbe, *inputs)
        rows: torch.Tensor = tbe(*inputs)
        return rows

    @property
    def joined_along(self) -> int:
        """The axis on which the groups' rows are concatenated."""
        return 1 if self.tables.pooled else 0

    def each_group(self, work: Callable[[int], T]) -> list[T]:
        """Call ``work`` with every group's number, all in parallel."""
        assert self._threads is not None
        return list(self._threads.map(work, range(len(self.tbes))))

    def group_lookup(self, group: int, sparse: KeyedJaggedTensor) -> torch.Tensor:
        """Rows of one group's F features, pooled float32 [B, F * D], or one for each of L lookups, [L, D]."""
        batch, offsets = sparse.stride(), sparse.offsets().long()
        first, last = (cut * batch for cut in self._cuts[group : group + 2])
        mine = offsets[first : last + 1]
        own = slice(int(mine[0]), int(mine[-1]))
        weights = sparse.weights().float() if self.tables.weighted else None
        rows: torch.Tensor = self.tbes[group](
            sparse.values()[own].long(), mine - mine[0], None if weights is None else weights[own]
        )
        return rows

    def read(self, region: Region) -> Values:
        """Current weights and optimizer state of ``region``."""
        weights, state = self._storage[region.table]
        rows = slice(region.start, region.stop)
        return to_numpy(weights[rows]), to_numpy(state[rows])

    def write(self, region: Region, values: Values) -> None:
        """Replace the weights and optimizer state of ``region``."""
        weights, state = self._storage[region.table]
        rows = slice(region.start, region.stop)
        with torch.no_grad():
            weights[rows] = torch.from_numpy(values[0]).to(weights.device)
            state[rows] = torch.from_numpy(values[1]).to(weights.device)

    def records_of(self, rows: RowIds) -> torch.Tensor:
        """A copy of the records of distinct ``rows``, float32 [n, width]."""
        records = torch.empty((len(rows), self.tables.layout.width), device=self.device)
        for (weights, state), places, local in self._by_table(rows):
            records[places] = torch.cat((weights[local], state[local]), dim=1)
        return records

    def replace_records(self, rows: RowIds, records: torch.Tensor) -> None:
        """Replace the records of distinct ``rows`` by ``records``."""
        with torch.no_grad():
            for (weights, state), places, local in self._by_table(rows):
                weights[local] = records[places, : self.tables.dim].to(weights.dtype)
                state[local] = records[places, self.tables.dim :]

    def _by_table(self, rows: RowIds) -> Iterator[tuple[private_api.Views, torch.Tensor, torch.Tensor]]:
        """For each table: its memory, the positions of its rows in ``rows``, and their numbers in the
        table."""
        layout = self.tables.layout
        tables = np.searchsorted(layout.bases, rows, side="right") - 1
        for index in np.unique(tables).tolist():
            places = np.flatnonzero(tables == index)
            local = torch.from_numpy(rows[places] - layout.bases[index]).to(self.device)
            yield self._storage[layout.tables[index]], torch.from_numpy(places).to(self.device), local

    def close(self) -> None:
        """End the groups' threads."""
        if self._threads is not None:
            self._threads.shutdown()


def _tbe(
    tables: TableSet, part: Sequence[Table], ahead: list[int], device: torch.device
) -> SplitTableBatchedEmbeddingBagsCodegen:
    """The TBE of some of the tables, preceded by tables with ``ahead`` rows and one feature each."""
    table_of = [i for i, table in enumerate(part, len(ahead)) for _ in table.features]
    rows = [*ahead, *(table.rows for table in part)]
    return fused_tbe(tables, rows, [*range(len(ahead)), *table_of], device, tables.pooled)


class _Grouped(torch.autograd.Function):
    """The groups' lookups and, in the backward pass, their updates. The anchor makes autograd call the
    latter."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, collection: ResidentCollection, sparse: KeyedJaggedTensor
    ) -> torch.Tensor:
        def look_up(group: int) -> torch.Tensor:
            with torch.enable_grad():
                return collection.group_lookup(group, sparse)

        ctx.collection, ctx.parts = collection, collection.each_group(look_up)
        return torch.cat([part.detach() for part in ctx.parts], dim=collection.joined_along)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        axis = ctx.collection.joined_along
        gradients = torch.split(gradient, [part.shape[axis] for part in ctx.parts], dim=axis)
        ctx.collection.each_group(
            lambda group: torch.autograd.backward(ctx.parts[group], gradients[group].contiguous())
        )
        return None, None, None
