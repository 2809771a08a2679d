"""All rows in device memory: FBGEMM's TBEs called without anything between them and the model."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from recpipe.embedding import seams
from recpipe.embedding.collection import RowCollection, fused_tbe
from recpipe.embedding.tables import Region, TableSet, Values, to_numpy

T = TypeVar("T")


class ResidentCollection(RowCollection):
    """All tables in TBEs with a fused optimizer; rows start as ``TableSet.fill`` gives them.

    FBGEMM's CPU kernels run in the thread that calls them. With ``groups`` above 1, tables are spread over so
    many TBEs, neighbours together, each driven by a thread of its own. Joining their outputs costs a copy, so
    that this pays where bags hold many ids.
    """

    def __init__(self, tables: TableSet, device: torch.device, groups: int = 1) -> None:
        super().__init__(tables)
        self.device = device
        self._names = [f.name for f in tables.features]
        rows = [f.rows for f in tables.features]
        self._cuts = [len(rows) * group // groups for group in range(groups + 1)]
        # A table that nothing looks up comes first: its empty bags are the room for the dense vector.
        self._has_room = groups == 1 and device.type == "cpu"
        ahead = [1] if self._has_room else []
        parts = [ahead + rows[a:b] for a, b in pairwise(self._cuts)]
        self.tbes = nn.ModuleList(fused_tbe(tables, part, range(len(part)), device) for part in parts)
        views = [view for tbe in self.tbes for view in seams.tbe_views(tbe)][len(ahead) :]
        self._storage = dict(zip(self._names, views, strict=True))
        # One core each: FBGEMM's update would otherwise enter a parallel region for every table.
        one_core = partial(torch.set_num_threads, 1)
        self._threads = ThreadPoolExecutor(groups, "recpipe-tbe", one_core) if groups > 1 else None
        self._offsets = torch.empty(0), torch.empty(0)
        self._anchor = torch.zeros(0, device=device, requires_grad=True)
        self.fill_first_values()

    def forward(self, sparse: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled rows of every feature; float32, each [B, D]."""
        if self._has_room:
            return self.keyed(self._looked_up(sparse)[:, self.tables.dim :])
        if self._threads is None:
            return self.keyed(self._looked_up(sparse))
        sparse = self._ordered(sparse)
        return self.keyed(_Grouped.apply(self._anchor, self, sparse))  # type: ignore[no-untyped-call]

    def pooled_with_room(self, sparse: KeyedJaggedTensor) -> torch.Tensor | None:
        """The TBE's output as it is; None of several TBEs, and on a GPU."""
        return self._looked_up(sparse) if self._has_room else None

    @property
    def threads(self) -> int:
        """One for each group."""
        return len(self.tbes)

    def _looked_up(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        sparse = self._ordered(sparse)
        offsets = sparse.offsets()
        if self._has_room:
            offsets = self._with_empty_bags(offsets, sparse.stride())
        pooled: torch.Tensor = self.tbes[0](sparse.values().long(), offsets.long())
        return pooled

    def _with_empty_bags(self, offsets: torch.Tensor, batch: int) -> torch.Tensor:
        """``offsets`` with bags of the first table in front; one-hot batches share theirs."""
        if self._offsets[0] is not offsets:
            self._offsets = offsets, torch.cat((offsets.new_zeros(batch), offsets))
        return self._offsets[1]

    def _ordered(self, sparse: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """With features in the tables' order, as recpipe's batches have them."""
        if sparse.keys() == self._names:
            return sparse
        return sparse.permute([sparse.keys().index(name) for name in self._names])

    def each_group(self, work: Callable[[int], T]) -> list[T]:
        """``work`` of every group's number, all at once."""
        assert self._threads is not None
        return list(self._threads.map(work, range(len(self.tbes))))

    def group_lookup(self, group: int, sparse: KeyedJaggedTensor) -> torch.Tensor:
        """Pooled rows of one group's features, float32 [B, F of the group * D]."""
        batch, offsets = sparse.stride(), sparse.offsets().long()
        first, last = (cut * batch for cut in self._cuts[group : group + 2])
        mine = offsets[first : last + 1]
        ids = sparse.values()[int(mine[0]) : int(mine[-1])].long()
        pooled: torch.Tensor = self.tbes[group](ids, mine - mine[0])
        return pooled

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

    def close(self) -> None:
        """End the groups' threads."""
        if self._threads is not None:
            self._threads.shutdown()


class _Grouped(torch.autograd.Function):
    """The groups' lookups, and in the backward pass their updates; the anchor makes autograd call it."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, collection: ResidentCollection, sparse: KeyedJaggedTensor
    ) -> torch.Tensor:
        def look_up(group: int) -> torch.Tensor:
            with torch.enable_grad():
                return collection.group_lookup(group, sparse)

        ctx.collection, ctx.parts = collection, collection.each_group(look_up)
        return torch.cat([part.detach() for part in ctx.parts], dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        gradients = torch.split(gradient, [part.shape[1] for part in ctx.parts], dim=1)
        ctx.collection.each_group(
            lambda group: torch.autograd.backward(ctx.parts[group], gradients[group].contiguous())
        )
        return None, None, None
