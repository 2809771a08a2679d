"""The hot set as a plain cache: rows enter with the first batch that uses them."""

from __future__ import annotations

from typing import Any

import numpy as np

from recpipe.kit import ChosenRows
from recpipe.plugin import Placement, RowIds, RowSpace, Slots


class HotOnUse(ChosenRows):
    """A fixed set of rows that stay resident once a batch has used them, so that none is fetched in advance
    or for nothing."""

    each_once = True

    def __init__(self, space: RowSpace, rows: RowIds) -> None:
        super().__init__(space)
        self.target = np.sort(rows)
        self._free: Slots | None = None
        """Slots without a row of the set, in order; None: not looked up yet."""

    def admit(self, hits: Slots, misses: RowIds, looked_up: RowIds) -> Placement:
        """Place those of ``misses`` that are in the set."""
        if self._free is None:
            held = self.space.residents.row_of_slot
            self._free = np.flatnonzero(~np.isin(held, self.target)).astype(np.int32)
        place = np.searchsorted(self.target, misses)
        inside = place < len(self.target)
        inside[inside] = self.target[place[inside]] == misses[inside]
        rows = misses[inside]
        # A run resumed with another set has other rows in some slots, and this batch may use them.
        usable = ~np.isin(self._free, hits) if len(rows) else np.zeros(len(self._free), bool)
        chosen = np.flatnonzero(usable)[: len(rows)]
        slots = self._free[chosen]
        self._free = np.delete(self._free, chosen)
        return Placement(slots, rows[: len(slots)])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with that set."""
        self.target, self._free = state["target"], None
