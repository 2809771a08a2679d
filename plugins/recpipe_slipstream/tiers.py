"""The tiers of all groups of tables as Slipstream looks at them: rows by their numbers among those of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recpipe.kit import Bags, Records
from recpipe.plugin import RowIds
from recpipe.tables.tiers.tiered import TieredEmbeddingBagCollection


class HotTiers:
    """``groups``: the tiers of each group. ``bags``: a batch's lookups, rows numbered over all groups.

    Groups have records of different widths; shorter ones come with zeros behind them.
    """

    def __init__(self, groups: Sequence[TieredEmbeddingBagCollection], bags: Callable[[Any], Bags]) -> None:
        self.groups, self.bags = list(groups), bags
        sizes = [group.tables.layout.total_rows for group in groups]
        self._bases = np.cumsum([0, *sizes])
        self.rows = int(self._bases[-1])
        """Of all tables."""
        self.slots = sum(group.planner.space.slots for group in groups)
        self.dim = max(group.tables.dim for group in groups)
        self._width = max(group.tables.layout.width for group in groups)

    @contextmanager
    def quiesced(self) -> Iterator[None]:
        """Inside, every row is where the last trained batch left it."""
        with ExitStack() as stack:
            for group in self.groups:
                stack.enter_context(group.quiesced())
            yield

    def resident(self) -> int:
        """How many rows are in slots."""
        with self.quiesced():
            return sum(int((group.planner.row_of_slot >= 0).sum()) for group in self.groups)

    def resident_weights(self) -> tuple[RowIds, NDArray[np.float32]]:
        """Rows that are resident after the last trained batch, sorted, int64 [n], and a copy of their
        weights, float32 [n, dim]."""
        found, parts = [], []
        for group, base in zip(self.groups, self._bases[:-1], strict=True):
            rows, records = group.resident_rows()
            weights = records[:, : group.tables.dim].cpu().numpy()
            parts.append(_padded(weights, self.dim))
            found.append(rows + base)
        return np.concatenate(found), np.concatenate(parts)

    def read_rows(self, rows: RowIds) -> Records:
        """Records of distinct ``rows``, sorted, float32 [n, widest]: a copy."""
        return np.concatenate(
            [
                _padded(self.groups[g].records_of(own).cpu().numpy(), self._width)
                for g, _, own in self._of(rows)
            ]
        )

    def write_rows(self, rows: RowIds, records: Records) -> None:
        """Replace the records of distinct ``rows``, sorted."""
        for number, part, own in self._of(rows):
            group = self.groups[number]
            with group.quiesced():
                group.write_rows(own, np.ascontiguousarray(records[part, : group.tables.layout.width]))

    def _of(self, rows: RowIds) -> Iterator[tuple[int, slice, RowIds]]:
        """Of each group: which of the sorted ``rows`` are its own, and their numbers in it."""
        cuts = np.searchsorted(rows, self._bases)
        for number, base in enumerate(self._bases[:-1].tolist()):
            part = slice(int(cuts[number]), int(cuts[number + 1]))
            yield number, part, rows[part] - base


def _padded(values: NDArray[np.float32], width: int) -> NDArray[np.float32]:
    """A copy with zeros behind each row, float32 [n, width]."""
    out = np.zeros((len(values), width), np.float32)
    out[:, : values.shape[1]] = values
    return out
