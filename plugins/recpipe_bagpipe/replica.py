"""One trainer's replicas: records in slots, and the row in each slot."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe_bagpipe.steps import Rows

NOWHERE = -1
"""The ``slot_of`` a row without a slot."""


class Replica:
    """``slots`` records float32 [slots, width] of any tables' rows. Only the training thread changes them,
    except for records of delayed rows, which are not used meanwhile."""

    def __init__(self, slots: int, rows: int, width: int) -> None:
        # Not zeroed, so that memory of slots that are never used is never touched.
        self.records = torch.empty((slots, width))
        self._slot_of = np.full(rows, NOWHERE, np.int32)
        self._row_of = np.full(slots, -1, np.int64)
        self._dirty = np.zeros(slots, bool)
        self._writes = np.zeros(slots, bool)
        self._free = np.arange(slots, dtype=np.int64)[::-1].copy()
        self._free_count = slots

    def put(self, rows: Rows, records: torch.Tensor) -> None:
        """Put ``rows``, which have no slots yet, and their ``records`` (float32 [n, width]) into slots."""
        left = self._free_count - len(rows)
        if left < 0:
            raise RuntimeError(
                f"bagpipe: the oracle plans {len(rows)} more rows, but {self._free_count} of "
                f"{len(self._free)} slots are free"
            )
        slots = self._free[left : self._free_count].copy()
        self._free_count = left
        self._slot_of[rows] = slots
        self._row_of[slots] = rows
        self.records[torch.from_numpy(slots)] = records

    def slots(self, rows: Rows) -> torch.Tensor:
        """The slots of ``rows``, int64 [n]; all must have one."""
        found = self._slot_of[rows].astype(np.int64)
        missing = int((found < 0).sum())
        if missing:
            raise RuntimeError(f"bagpipe: {missing} of {len(rows)} rows are not resident when needed")
        return torch.from_numpy(found)

    def take(self, rows: Rows) -> torch.Tensor:
        """A copy of the records of ``rows``, float32 [n, width]."""
        return self.records[self.slots(rows)]

    def release(self, rows: Rows) -> None:
        """Free the slots of ``rows``."""
        slots = self.slots(rows).numpy()
        self._slot_of[rows] = NOWHERE
        self._row_of[slots] = -1
        self._dirty[slots] = False
        self._free[self._free_count : self._free_count + len(slots)] = slots
        self._free_count += len(slots)

    def mark(self, rows: Rows, writes: NDArray[np.bool_]) -> None:
        """Note that ``rows`` change in this batch; ``writes``: whether this trainer will write them."""
        slots = self.slots(rows).numpy()
        self._dirty[slots] = True
        self._writes[slots] = writes

    def flushed(self) -> Rows:
        """The changed rows that this trainer has to write, sorted; none is marked as changed afterwards."""
        rows = np.sort(self._row_of[self._dirty & self._writes])
        self._dirty.fill(False)
        return rows

    def clear(self) -> None:
        """Forget all rows."""
        self._slot_of.fill(NOWHERE)
        self._row_of.fill(-1)
        self._dirty.fill(False)
        self._free = np.arange(len(self._free), dtype=np.int64)[::-1].copy()
        self._free_count = len(self._free)

    @property
    def overhead_bytes(self) -> int:
        """Memory beyond the records."""
        maps = (self._slot_of, self._row_of, self._dirty, self._writes, self._free)
        return sum(part.nbytes for part in maps)
