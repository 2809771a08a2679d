"""What training has changed since the last time that was asked: the rows of each group of tables, and the ids
that have got or lost their rows.

Rows are noted where they are updated (``GroupRows.backward``), begun anew (``GrowingTables.begin``) or
replaced by the update of ids that the model makes (``CollectionProxy.update_late``): exactly those that a
step may have changed, wherever they are kept. A rank notes those of its own samples.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.plugin.bags import RowIds
from recpipe.plugin.tables import TableSet
from recpipe.tables.dynamic.admission import Keys
from recpipe.tables.dynamic.id_map import Rows, Turn

NO_ROW = -1
"""In place of the row of an id that has none any more."""


class ChangedRows:
    """The rows of a group of ``tables`` that have changed: a mark for each, one byte, on the device where the
    ids of batches are, so that noting them waits for no GPU."""

    def __init__(self, tables: TableSet) -> None:
        self._firsts = torch.from_numpy(tables.layout.bases[tables.table_of])
        """The number of row 0 of each feature's table in the group, int64 [F]."""
        self._marks = torch.zeros(tables.layout.total_rows, dtype=torch.bool)

    def looked_up(self, ids: KeyedJaggedTensor) -> None:
        """Note the rows of ``ids``, features in the tables' order, which are being updated."""
        values = ids.values()
        if self._marks.device != values.device:
            self._marks, self._firsts = self._marks.to(values.device), self._firsts.to(values.device)
        counts = torch.tensor(ids.length_per_key(), device=values.device)
        firsts = self._firsts.repeat_interleave(counts, output_size=len(values))
        self._marks[values + firsts] = True

    def add(self, rows: RowIds) -> None:
        """Note these ``rows`` of the group."""
        self._marks[torch.from_numpy(rows).to(self._marks.device)] = True

    @property
    def size(self) -> int:
        """How many rows there are."""
        return len(self._marks)

    def taken(self, low: int = 0, high: int | None = None) -> RowIds:
        """The rows in [low, high) that have changed, ascending, int64 [n], of which none is noted any
        more."""
        part = self._marks[low:high]
        rows = part.nonzero().view(-1)
        part.zero_()
        found: RowIds = rows.cpu().numpy() + low
        return found


ChangedRowsOf = Mapping[str, tuple[Keys, Rows]]
"""By the table of the data: keys of ids, ascending, and the rows that they have now, ``NO_ROW`` for those
that have lost theirs; int64 [n] each."""


class ChangedIds:
    """The ids of tables that grow which have got or lost rows."""

    def __init__(self) -> None:
        self._events: dict[str, list[tuple[Keys, Rows]]] = {}

    def begun(self, table: str, turn: Turn) -> None:
        """Note what a batch has changed whose turn has come."""
        if len(turn.rows):
            lost: NDArray[np.int64] = turn.before[turn.rows < turn.used, 0]
            self.add(table, np.concatenate((lost, turn.keys)), _lost_and_got(len(lost), turn.rows))

    def add(self, table: str, keys: Keys, rows: Rows) -> None:
        """Note that ``keys`` have these ``rows`` now, or ``NO_ROW``; of a key that comes twice the latter
        counts."""
        self._events.setdefault(table, []).append((keys, rows))

    def put_back(self, changed: ChangedRowsOf) -> None:
        """Note once more what ``taken`` has given; what has been noted since comes after it."""
        for table, event in changed.items():
            self._events.setdefault(table, []).insert(0, event)

    def taken(self) -> ChangedRowsOf:
        """Each id that has changed, once, of which none is noted any more."""
        events, self._events = self._events, {}
        found = {}
        for table, own in events.items():
            keys, rows = (np.concatenate(each)[::-1] for each in zip(*own, strict=True))
            distinct, latest = np.unique(keys, return_index=True)
            found[table] = distinct, rows[latest]
        return found


def _lost_and_got(lost: int, rows: Rows) -> Rows:
    return np.concatenate((np.full(lost, NO_ROW), rows))
