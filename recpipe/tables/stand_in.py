"""Tables with few of their rows, in place of the whole ones: for what asks a model about its steps without
training it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.data.parts import in_order
from recpipe.plugin.tables import TableSet
from recpipe.tables.groups import ModelTables
from recpipe.tables.resident import ResidentCollection

BYTES = 64 << 20
"""The size of all tables together: more than a cache holds, but quickly made."""
LEARNING_RATE = 1e-12
"""Almost no learning, so that the loss stays finite after any number of steps."""


def with_few_rows(tables: ModelTables) -> list[TableSet]:
    """Each group of ``tables`` with fewer rows, of ``BYTES`` at most together."""
    groups = tables.groups
    rows = max(1, BYTES // sum(len(g.tables.tables) * g.tables.record_bytes for g in groups))
    return [_cut(group.tables, rows) for group in groups]


class FewRows(ResidentCollection):
    """One of ``with_few_rows`` on the CPU that takes any ids of the whole tables: those beyond its rows begin
    anew."""

    def __init__(self, tables: TableSet, room: bool) -> None:
        super().__init__(tables, torch.device("cpu"), room=room)

    def _looked_up(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        return super()._looked_up(within(in_order(sparse, self.tables.features), self.tables))


def within(ids: KeyedJaggedTensor, tables: TableSet) -> KeyedJaggedTensor:
    """``ids`` (of the tables' features, in their order), each within the rows of its table."""
    rows = torch.tensor([tables.tables[table].rows for table in tables.table_of])
    limits = rows.repeat_interleave(torch.tensor(ids.length_per_key()))
    return KeyedJaggedTensor(
        ids.keys(), ids.values() % limits, ids.weights_or_none(), ids.lengths(), ids.offsets()
    )


def _cut(tables: TableSet, most: int) -> TableSet:
    cut = tuple(replace(table, rows=min(table.rows, most), first=None) for table in tables.tables)
    slow = tables.optimizer if tables.optimizer.frozen else replace(tables.optimizer, lr=LEARNING_RATE)
    return replace(tables, tables=cut, optimizer=slow)
