"""A read-only view of a model's tables for plugins: which rows are resident, and what their weights are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recpipe.errors import UserError
from recpipe.plugin.bags import RowIds
from recpipe.plugin.collection import TableCollection
from recpipe.plugin.skipper import Mark, RowView
from recpipe.tables.capabilities import ShowsRows
from recpipe.tables.groups import ModelTables


class TablesView(RowView):
    """The rows of these ``tables``, as their ``collections`` show them."""

    def __init__(self, tables: ModelTables, collections: Sequence[TableCollection]) -> None:
        self._tables, self._collections = tables, tuple(collections)
        self._bases = tables.bases
        self.rows = tables.total_rows
        self.dim = max(group.tables.dim for group in tables.groups)

    @property
    def slots(self) -> int:
        return sum(group.slots for group in self._groups())

    @property
    def resident_count(self) -> int:
        return sum(group.resident_count for group in self._groups())

    def resident(self) -> RowIds:
        pairs = zip(self._groups(), self._bases[:-1], strict=True)
        return np.concatenate([group.resident_rows() + base for group, base in pairs])

    def mark(self, rows: RowIds | None = None) -> Mark:
        rows = self.resident() if rows is None else rows
        weights = np.zeros((len(rows), self.dim), np.float32)
        cuts = np.searchsorted(rows, self._bases)
        for number, group in enumerate(self._groups()):
            mine = slice(int(cuts[number]), int(cuts[number + 1]))
            dim = self._tables.groups[number].tables.dim
            found = group.resident_weights(rows[mine] - self._bases[number])
            weights[mine, :dim] = found.cpu().numpy()
        return Mark(rows, weights)

    def _groups(self) -> list[ShowsRows]:
        shown = [collection.offers(ShowsRows) for collection in self._collections]
        for found, collection in zip(shown, self._collections, strict=True):
            if found is None:
                raise UserError(
                    f"a plugin asks which rows are resident, which {type(collection).__name__} does not show"
                    ": drop that plugin, or what keeps these tables another way"
                )
        return [found for found in shown if found is not None]
