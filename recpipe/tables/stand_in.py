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
    cut = []
    for own in (group.tables for group in groups):
        fewer = tuple(replace(table, rows=min(table.rows, rows), first=None) for table in own.tables)
        slow = own.optimizer if own.optimizer.frozen else replace(own.optimizer, lr=LEARNING_RATE)
        cut.append(replace(own, tables=fewer, optimizer=slow))
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
