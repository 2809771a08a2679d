"""All rows in device memory: in FBGEMM's TBEs, which are called directly, or as a replica on each of several
trainers; and tables with few of their rows, for what asks a model about its steps without training it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from numpy.typing import NDArray
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe import private_api
from recpipe.common.device import keep_to_one_core
from recpipe.data.parts import in_order
from recpipe.distributed.ranks import Channel
from recpipe.plugin.bags import RowIds, distinct
from recpipe.plugin.skipper import RowFilter
from recpipe.plugin.tables import Region, TableSet, Values, to_numpy
from recpipe.tables.collection import AllResident, fused_tbe, make_tbe, read_rows_of
from recpipe.tables.group_rows import GroupRows, GroupTables
from recpipe.tables.groups import ModelTables
from recpipe.tables.rows import evaluated, row_bags
from recpipe.tables.skipping import FilteredLookups, by_feature
from recpipe.tables.tiers.layout import SharedTable

FEW_BYTES = 64 << 20
"""The size of all tables ``with_few_rows`` together: more than a cache holds, but quickly made."""
ALMOST_NO_RATE = 1e-12
"""Almost no learning, so that the loss stays finite after any number of steps."""


class ResidentCollection(AllResident, GroupTables):
    """All tables in TBEs with a fused optimizer; ``TableSet.fill`` gives the first values.

    FBGEMM's CPU kernels run in the thread that calls them. With ``groups`` above 1, neighbouring tables are
    put together into so many TBEs, each driven by its own thread. Joining their outputs costs a copy, so this
    pays only if bags hold many ids. On a GPU, ``groups`` above 1 is a ValueError: autograd has one thread for
    a GPU, which would wait for itself. ``padded``: whether pooled rows may be asked for with padding in
    front. If it is then not asked for, removing it costs a copy of the gradient.

    On a CPU, rows that are not pooled are in one physical table, and each id is a bag of its own, as in
    tiers: FBGEMM's update of rows without pooling takes ten times as long as that of bags.
    """

    def __init__(self, tables: TableSet, device: torch.device, groups: int = 1, padded: bool = True) -> None:
        if groups > 1 and device.type != "cpu":
            raise ValueError(f"{groups} groups on {device}: only on a CPU can a lookup have several TBEs")
        super().__init__(tables)
        self.device = device
        self._on_cpu = device.type == "cpu"
        self._ids_apart = self._on_cpu and not tables.pooled
        """Whether each id is a bag of its own, and a TBE's tables are one physical table."""
        # The first table is never looked up: its empty bags are the padding, for the dense vector.
        self._padded = padded and groups == 1 and self._on_cpu and tables.pooled and not tables.weighted
        ahead = [1] if self._padded else []
        cuts = [len(tables.tables) * group // groups for group in range(groups + 1)]
        parts = [tables.tables[a:b] for a, b in pairwise(cuts)]
        ends = np.cumsum([0, *(len(table.features) for part in parts for table in part)])
        self._cuts = ends[cuts].tolist()
        self._bases = tables.layout.bases[cuts]
        """The number of the first row of each TBE's tables."""
        own = np.repeat(self._bases[:-1], np.diff(self._cuts))
        self._firsts = torch.from_numpy(tables.layout.bases[tables.table_of] - own)
        """The number of row 0 of each feature's table among the rows of its TBE, int64 [F]."""
        self.tbes = nn.ModuleList()
        views: list[private_api.Views] = []
        for part in parts:
            rows = [table.rows for table in part]
            if self._ids_apart:
                self.tbes.append(make_tbe(tables, sum(rows), device))
                weights, state = private_api.tbe_views(self.tbes[-1])[0]
                views += zip(torch.split(weights, rows), torch.split(state, rows), strict=True)
                continue
            features = [i for i, table in enumerate(part, len(ahead)) for _ in table.features]
            at = [*range(len(ahead)), *features]
            self.tbes.append(fused_tbe(tables, [*ahead, *rows], at, device, tables.pooled))
            views += private_api.tbe_views(self.tbes[-1])[len(ahead) :]
        self._storage = dict(zip(tables.layout.tables, views, strict=True))
        # One core for each thread: FBGEMM's update would otherwise enter a parallel region for every table.
        self.threads = groups
        self._threads = ThreadPoolExecutor(groups, "recpipe-tbe", keep_to_one_core) if groups > 1 else None
        self._offsets = torch.empty(0), torch.empty(0)
        self._anchor = torch.zeros(0, device=device, requires_grad=True)
        self.fill_first_values()

    def filter_updates(self, rows: RowFilter) -> None:
        self.row_filter = rows
        bases = self.tables.layout.bases[self.tables.table_of]
        summed = self.tables.pooled or self._ids_apart
        for group, (tbe, (first, last)) in enumerate(zip(self.tbes, pairwise(self._cuts), strict=True)):
            own = self._bases[group : group + 1] if self._ids_apart else bases[first:last]
            if self._padded:
                own = np.append(0, own)  # without the table that is never looked up
            tbe.forward = FilteredLookups(tbe, rows, by_feature(own), len(own), summed)

    def lookup(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        if self.tables.optimizer.clock.shows and not torch.is_grad_enabled():
            return read_rows_of(self, sparse)
        if self._padded:
            return self._looked_up(sparse)[:, self.tables.dim :]
        if self._threads is None:
            return self._looked_up(sparse)
        sparse = in_order(sparse, self.tables.features)
        rows: torch.Tensor = _InThreads.apply(self._anchor, self, self._threads, sparse)  # type: ignore[no-untyped-call]
        return rows

    def compute(self, rows: GroupRows, warm: bool, cold: bool) -> tuple[torch.Tensor, None]:
        """All rows; with padding, which is the first table's, if the batch wants it."""
        if not self._padded:
            return self.lookup(rows.ids), None
        wide = self._looked_up(rows.ids)
        if not rows.wants_padding:
            return wide[:, self.tables.dim :], None
        rows.padding = self.tables.dim
        return wide, None

    def _looked_up(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        sparse = in_order(sparse, self.tables.features)
        if self._ids_apart:
            return self._found(0, *self._apart(0, sparse, sparse.values()), None)
        offsets = sparse.offsets()
        if self._padded:  # preceded by the first table's empty bags; one-hot batches share the result
            if self._offsets[0] is not offsets:
                self._offsets = offsets, torch.cat((offsets.new_zeros(sparse.stride()), offsets))
            offsets = self._offsets[1]
        weights = sparse.weights().float() if self.tables.weighted else None
        return self._found(0, sparse.values().long(), offsets.long(), weights)

    def _found(
        self, group: int, indices: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        """What the group's TBE looks up."""
        tbe = self.tbes[group]
        if self._on_cpu and not torch.is_grad_enabled():
            assert isinstance(tbe, SplitTableBatchedEmbeddingBagsCodegen)
            return private_api.look_up_only(tbe, indices, offsets, weights)
        rows: torch.Tensor = tbe(indices, offsets, weights)
        return rows

    def _apart(
        self, group: int, sparse: KeyedJaggedTensor, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices and offsets of the bags of one id each, int64 [L] and [L + 1], of the ``ids`` in ``sparse``
        that are looked up in one group's tables."""
        features = slice(*self._cuts[group : group + 2])
        counts = torch.tensor(sparse.length_per_key()[features])
        firsts = self._firsts[features].repeat_interleave(counts, output_size=len(ids))
        return ids + firsts, torch.arange(len(ids) + 1)

    def group_lookup(self, group: int, sparse: KeyedJaggedTensor) -> torch.Tensor:
        """Rows of one group's F features, pooled float32 [B, F * D], or one for each of L lookups, [L, D]."""
        batch, offsets = sparse.stride(), sparse.offsets().long()
        first, last = (cut * batch for cut in self._cuts[group : group + 2])
        mine = offsets[first : last + 1]
        own = slice(int(mine[0]), int(mine[-1]))
        ids = sparse.values()[own]
        if self._ids_apart:
            return self._found(group, *self._apart(group, sparse, ids), None)
        weights = sparse.weights()[own].float() if self.tables.weighted else None
        return self._found(group, ids.long(), mine - mine[0], weights)

    def read(self, region: Region) -> Values:
        weights, state = self._storage[region.table]
        rows = slice(region.start, region.stop)
        return to_numpy(weights[rows]), to_numpy(state[rows])

    def write(self, region: Region, values: Values) -> None:
        weights, state = self._storage[region.table]
        rows = slice(region.start, region.stop)
        with torch.no_grad():
            weights[rows] = torch.from_numpy(values[0]).to(weights.device)
            state[rows] = torch.from_numpy(values[1]).to(weights.device)

    def records_of(self, rows: RowIds) -> torch.Tensor:
        records = torch.empty((len(rows), self.tables.layout.width), device=self.device)
        for (weights, state), places, local in self._by_table(rows):
            records[places] = torch.cat((weights[local], state[local]), dim=1)
        return records

    def weights_of(self, rows: RowIds) -> NDArray[np.float32]:
        # Ascending, so that each table's are side by side; without the optimizer's state.
        cuts = np.searchsorted(rows, self.tables.layout.bases)
        found = torch.empty(len(rows), self.tables.dim, device=self.device)
        for table, base, (low, high) in zip(
            self.tables.layout.tables, self.tables.layout.bases, pairwise(cuts), strict=False
        ):
            weights, local = self._storage[table][0].detach(), torch.from_numpy(rows[low:high] - base)
            found[low:high] = weights.index_select(0, local.to(self.device))
        return to_numpy(found)

    def replace_records(self, rows: RowIds, records: torch.Tensor) -> None:
        with torch.no_grad():
            for (weights, state), places, local in self._by_table(rows):
                weights[local] = records[places, : self.tables.dim].to(weights.dtype)
                state[local] = records[places, self.tables.dim :]

    def renew(self, rows: RowIds, records: torch.Tensor) -> None:
        self.replace_records(rows, records.to(self.device))

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
        if self._threads is not None:
            self._threads.shutdown()


class _InThreads(torch.autograd.Function):
    """The groups' lookups and, in the backward pass, their updates. The anchor makes autograd call the
    latter."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        collection: ResidentCollection,
        threads: ThreadPoolExecutor,
        sparse: KeyedJaggedTensor,
    ) -> torch.Tensor:
        def look_up(group: int) -> torch.Tensor:
            with torch.enable_grad():
                return collection.group_lookup(group, sparse)

        ctx.threads, ctx.axis = threads, 1 if collection.tables.pooled else 0
        ctx.parts = list(threads.map(look_up, range(len(collection.tbes))))
        return torch.cat([part.detach() for part in ctx.parts], dim=ctx.axis)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None, None]:
        gradients = torch.split(gradient, [part.shape[ctx.axis] for part in ctx.parts], dim=ctx.axis)

        def update(part: torch.Tensor, own: torch.Tensor) -> None:
            torch.autograd.backward(part, own.contiguous())

        list(ctx.threads.map(update, ctx.parts, gradients))
        return None, None, None, None


class ReplicatedCollection(AllResident, GroupTables):
    """All rows on every trainer (``tiers.policy=resident`` with several trainers), as replicas with equal
    bits."""

    replicated = True

    def __init__(self, tables: TableSet, device: torch.device, trainers: Channel) -> None:
        super().__init__(tables)
        self.trainers = trainers
        self.table = SharedTable(tables, tables.layout.total_rows, device, trainers)
        self.fill_first_values()

    def filter_updates(self, rows: RowFilter) -> None:
        self.row_filter, self.table.stay = rows, rows.stay

    def lookup(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        """Rows of this trainer's samples. The trainers tell each other which rows they look up."""
        bags = row_bags(self.tables, sparse)
        if torch.is_grad_enabled() and not self.tables.optimizer.frozen:
            touched = distinct(np.concatenate(self.trainers.gather(bags.distinct)))
            rows: torch.Tensor = self.table(bags, touched)
            return rows
        if self.tables.optimizer.clock.shows:
            return bags.pooled(evaluated(self.tables, self.records_of(bags.distinct)))
        return bags.pooled(self.table.weights, torch.from_numpy(bags.distinct))

    def compute(self, rows: GroupRows, warm: bool, cold: bool) -> tuple[torch.Tensor, None]:
        return self.lookup(rows.ids), None

    def records_of(self, rows: RowIds) -> torch.Tensor:
        at = torch.from_numpy(rows)
        return torch.cat((self.table.weights[at], self.table.state[at]), dim=1)

    def replace_records(self, rows: RowIds, records: torch.Tensor) -> None:
        """Replace the records of distinct ``rows`` by ``records`` on this trainer."""
        at, records = torch.from_numpy(rows), records.to(self.table.weights.device)
        self.table.weights[at] = records[:, : self.tables.dim]
        self.table.state[at] = records[:, self.tables.dim :]

    def renew(self, rows: RowIds, records: torch.Tensor) -> None:
        self.replace_records(rows, records)


def with_few_rows(tables: ModelTables) -> list[TableSet]:
    """Each group of ``tables`` with fewer rows, of ``FEW_BYTES`` at most together, and the same kernels."""
    groups = tables.groups
    rows = max(1, FEW_BYTES // sum(len(g.tables.tables) * g.tables.record_bytes for g in groups))
    cut = []
    for own in (group.tables for group in groups):
        fewer = tuple(replace(table, rows=min(table.rows, rows), first=None) for table in own.tables)
        slow = own.optimizer if own.optimizer.frozen else replace(own.optimizer, lr=ALMOST_NO_RATE)
        cut.append(replace(own, tables=fewer, optimizer=slow))
        cut[-1].kernel.faster = own.kernel.faster
    return cut


class FewRows(ResidentCollection):
    """One of ``with_few_rows`` on the CPU that takes any ids of the whole tables: those beyond its rows begin
    anew."""

    def __init__(self, tables: TableSet, room: bool) -> None:
        super().__init__(tables, torch.device("cpu"), padded=room)

    def _looked_up(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        return super()._looked_up(within(in_order(sparse, self.tables.features), self.tables))


def within(ids: KeyedJaggedTensor, tables: TableSet) -> KeyedJaggedTensor:
    """``ids`` (of the tables' features, in their order), each within the rows of its table."""
    rows = torch.tensor([tables.tables[table].rows for table in tables.table_of])
    limits = rows.repeat_interleave(torch.tensor(ids.length_per_key()))
    return KeyedJaggedTensor(
        ids.keys(), ids.values() % limits, ids.weights_or_none(), ids.lengths(), ids.offsets()
    )
