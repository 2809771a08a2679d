"""The lookups of one group of tables, followed for the miss rates of the group and of its largest tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from recpipe.access.misses import SHARES, MissRates, RowSample, most_popular
from recpipe.plugin.bags import IndexBags
from recpipe.tables.groups import Group
from recpipe.tables.inputs import Inputs


class Followed:
    """A group of tables as they share one cache, and its largest tables each alone."""

    def __init__(
        self, group: Group, shares: Sequence[float], together: MissRates, alone: dict[int, MissRates]
    ) -> None:
        self.group, self.shares = group, shares
        """``shares``: of rows that have a slot, ascending, all of ``misses.SHARES`` among them."""
        self.together, self.alone = together, alone
        """``alone``: by the table's number in the group."""
        self._seen = np.zeros(len(group.tables.layout.tables), bool)
        """For each table, whether a batch has looked it up."""

    @classmethod
    def of(
        cls,
        number: int,
        inputs: Inputs,
        read: Callable[[], Iterable[Any]],
        batches: int,
        shares: Sequence[float] = SHARES,
        largest: int = 0,
    ) -> Followed:
        """Follow group ``number`` over so many ``batches``, and its so many ``largest`` tables each alone;
        ``read`` begins anew with each call."""
        group = inputs.tables.groups[number]
        layout = group.tables.layout
        popular = most_popular(
            layout.total_rows, lambda: (inputs.bags(batch, number).indices for batch in read())
        )

        def rates(first: int, rows: int) -> MissRates:
            own = popular[(popular >= first) & (popular < first + rows)] - first
            return MissRates(RowSample(rows, own), [share * rows for share in shares], batches // 2)

        ordered = sorted(range(len(layout.rows)), key=lambda table: -layout.rows[table])[:largest]
        alone = {table: rates(int(layout.bases[table]), layout.rows[table]) for table in sorted(ordered)}
        return cls(group, shares, rates(0, layout.total_rows), alone)

    def add(self, bags: IndexBags) -> None:
        """Note a batch's lookups."""
        self.together.add(bags.indices)
        tables = self.group.tables
        ends = bags.offsets[np.arange(len(tables.features) + 1) * bags.batch_size]
        self._seen[tables.table_of[np.flatnonzero(np.diff(ends))]] = True
        for table, rates in self.alone.items():
            features = np.flatnonzero(tables.table_of == table)
            found = [bags.indices[ends[feature] : ends[feature + 1]] for feature in features]
            rates.add(np.concatenate(found) - tables.layout.bases[table])

    def never(self) -> list[str]:
        """Names of the tables that no batch has looked up."""
        return [self.group.tables.layout.tables[table] for table in np.flatnonzero(~self._seen)]
