"""A sample of the rows that training looks up, from batches spread evenly over the run."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recpipe.tables.groups import ModelTables
from recpipe.tables.inputs import GroupIds

MOST = 1 << 21
"""Most lookups to keep (8 MiB), unless a single batch has more."""
BATCHES = 1 << 10
"""Most batches to keep: each takes some hundred bytes beside its lookups, more than a small one's lookups."""


class _Kept(NamedTuple):
    """A batch's ids in one group: ``ids`` [L], feature by feature, of which each has so many (int64 [F])."""

    ids: NDArray[np.int32]
    each: NDArray[np.int64]


class AccessSample:
    """Keeps the ids of every ``stride``-th batch; the stride doubles whenever they become too many.

    A kept batch costs one copy of its ids. Ids on a GPU are left out, since a copy would wait for it.
    """

    def __init__(self, tables: ModelTables, most: int = MOST) -> None:
        self.tables, self.most = tables, most
        self.stride = 1
        self.lookups = 0
        """How many lookups are kept."""
        self._kept: list[list[_Kept | None]] = []
        self._seen = 0

    @property
    def batches(self) -> int:
        """From how many batches."""
        return len(self._kept)

    def add(self, each: GroupIds) -> None:
        """Take a batch into account."""
        number, self._seen = self._seen, self._seen + 1
        if number % self.stride:
            return
        batch: list[_Kept | None] = []
        looked_up = 0
        for group, ids in zip(self.tables.groups, each, strict=True):
            if ids is None or ids.values().is_cuda:
                batch.append(None)
                continue
            ends = np.arange(len(group.tables.features) + 1) * ids.stride()
            counts = np.diff(ids.offsets().numpy()[ends]).astype(np.int64)
            batch.append(_Kept(ids.values().numpy().astype(np.int32), counts))
            looked_up += ids.values().numel()
        self._kept.append(batch)
        self.lookups += looked_up
        while len(self._kept) > 1 and (self.lookups > self.most or len(self._kept) > BATCHES):
            self._kept = self._kept[::2]
            self.stride *= 2
            self.lookups = sum(len(kept.ids) for batch in self._kept for kept in batch if kept is not None)

    def counts(self) -> dict[str, NDArray[np.int64]]:
        """For each table whose ids were kept: how often each of its rows that occur was looked up, in no
        order, int64 [distinct rows]."""
        found: dict[str, NDArray[np.int64]] = {}
        for number, group in enumerate(self.tables.groups):
            parts = [kept for batch in self._kept if (kept := batch[number]) is not None]
            by_table: dict[int, list[NDArray[np.int32]]] = {}
            for part in parts:
                pieces = np.split(part.ids, np.cumsum(part.each)[:-1])
                for table, piece in zip(group.tables.table_of.tolist(), pieces, strict=True):
                    by_table.setdefault(table, []).append(piece)
            for table, pieces in by_table.items():
                name = group.tables.layout.tables[table]
                found[name] = np.unique(np.concatenate(pieces), return_counts=True)[1]
        return found
