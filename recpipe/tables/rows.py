"""The rows that a batch's ids stand for, numbered over the tables of a group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from recpipe.common.loops import ALONE, Spread
from recpipe.data.parts import in_order, unknown_id
from recpipe.plugin.bags import IndexBags, Offsets, RowIds

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    from recpipe.plugin.tables import TableSet


def table_bags(tables: TableSet, sparse: KeyedJaggedTensor, spread: Spread = ALONE) -> IndexBags:
    """The batch's lookups as rows of the set, with features in the tables' order, independent of that in
    ``sparse``."""
    sparse = in_order(sparse, tables.features)
    values = sparse.values().cpu().numpy()
    offsets = sparse.offsets().cpu().numpy().astype(np.int64, copy=False)
    size = sparse.stride()
    ends = offsets[np.arange(len(tables.features) + 1) * size]
    weights = sparse.weights().detach().float().cpu().numpy() if tables.weighted else None
    return IndexBags(checked_rows(tables, values, ends, spread), offsets, size, weights)


def checked_rows(tables: TableSet, ids: RowIds, ends: Offsets, spread: Spread = ALONE) -> RowIds:
    """The rows of ``ids`` (int32 or int64 [L]), of which those of feature f are ``ends[f]`` up to
    ``ends[f + 1]``.

    Raises ``DataError`` if an id is not in its table.
    """
    bases, counts = tables.layout.bases[tables.table_of], np.diff(ends)
    sizes = np.diff(tables.layout.bases)[tables.table_of]
    rows = np.empty(len(ids), np.int64)

    def check(features: NDArray[np.int64]) -> None:
        used = features[counts[features] > 0]
        if not len(used):
            return
        # As an unsigned number, an id below 0 is above all others.
        unsigned = ids.view(f"u{ids.itemsize}")
        part = slice(ends[used[0]], ends[used[-1] + 1])
        most = np.maximum.reduceat(unsigned[part], ends[used] - part.start)
        for feature in used[most >= sizes[used].astype(np.uint64)]:
            own = slice(ends[feature], ends[feature + 1])
            at = int(np.argmax(unsigned[own] >= sizes[feature]))
            raise unknown_id(ids[own][at], tables.features[feature], sizes[feature])
        np.add(ids[part], np.repeat(bases[used], counts[used]), out=rows[part])

    threads = min(len(spread.parts(len(ids))), len(counts))
    spread.map(check, np.array_split(np.arange(len(counts)), threads))
    return rows
