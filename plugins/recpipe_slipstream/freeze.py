"""The strict variant: a stale row keeps its every bit while its mark is in force."""

from __future__ import annotations

import numpy as np

from recpipe.kit import Records
from recpipe.plugin import NOTHING, RowIds
from recpipe_slipstream.classifier import Marks
from recpipe_slipstream.tiers import HotTiers


class FrozenRows:
    """Puts back stale rows that a batch has changed, optimizer state included.

    A fused optimizer updates every row that it looks up and cannot be told to leave some out, so their
    records are kept from the moment when the mark comes into force.
    """

    def __init__(self) -> None:
        self.marks: Marks | None = None
        self.rows: RowIds = NOTHING.rows
        """Frozen rows, sorted, int64 [n]."""
        self.records: Records = np.empty((0, 0), np.float32)
        """Their records, float32 [n, width]."""

    def switch(self, tiers: HotTiers, marks: Marks | None) -> None:
        """``marks`` (None: none) are in force from the next batch on: rows freeze as they are now."""
        if marks is self.marks:
            return
        self.marks = marks
        self.rows = NOTHING.rows if marks is None else marks.stale_rows
        if len(self.rows):
            self.records = tiers.read_rows(self.rows)

    def put_back(self, tiers: HotTiers, looked_up: RowIds) -> None:
        """Undo what the batch that looked up ``looked_up`` (repeats included) did to frozen rows."""
        touched = np.flatnonzero(np.isin(self.rows, looked_up))
        if len(touched):
            tiers.write_rows(self.rows[touched], self.records[touched])
