"""All rows on every trainer, as replicas with equal bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.distributed.ranks import Channel
from recpipe.plugin.bags import RowIds, distinct
from recpipe.plugin.tables import Region, TableSet, Values, to_numpy
from recpipe.tables.collection import AllResident
from recpipe.tables.group_rows import GroupRows, GroupTables
from recpipe.tables.rowtable import row_bags
from recpipe.tables.tiers.shared_table import SharedTable

if TYPE_CHECKING:
    from recpipe.plugin.skipper import RowFilter


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
        """Leave rows out of the update, on every trainer."""
        self.row_filter, self.table.stay = rows, rows.stay

    def lookup(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        """Rows of this trainer's samples. The trainers tell each other which rows they look up."""
        bags = row_bags(self.tables, sparse)
        if torch.is_grad_enabled() and not self.tables.optimizer.frozen:
            touched = distinct(np.concatenate(self.trainers.gather(bags.distinct)))
            rows: torch.Tensor = self.table(bags, touched)
            return rows
        return bags.pooled(self.table.weights, torch.from_numpy(bags.distinct))

    def compute(self, rows: GroupRows, warm: bool, cold: bool) -> tuple[torch.Tensor, None]:
        """All rows."""
        return self.lookup(rows.ids), None

    def records_of(self, rows: RowIds) -> torch.Tensor:
        """A copy of the records of distinct ``rows``, float32 [n, width]."""
        at = torch.from_numpy(rows)
        return torch.cat((self.table.weights[at], self.table.state[at]), dim=1)

    def replace_records(self, rows: RowIds, records: torch.Tensor) -> None:
        """Replace the records of distinct ``rows`` by ``records`` on this trainer."""
        at = torch.from_numpy(rows)
        self.table.weights[at] = records[:, : self.tables.dim]
        self.table.state[at] = records[:, self.tables.dim :]

    def read(self, region: Region) -> Values:
        """Current weights and optimizer state of ``region``."""
        records = to_numpy(self.records_of(self.rows_of(region)))
        return records[:, : self.tables.dim], records[:, self.tables.dim :]

    def write(self, region: Region, values: Values) -> None:
        """Replace the weights and optimizer state of ``region``."""
        records = torch.from_numpy(np.concatenate(values, axis=1)).to(self.table.weights.device)
        self.replace_records(self.rows_of(region), records)
