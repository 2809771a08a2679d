"""How much of the machine's processors other programs take, from /proc/stat."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

BUSY_OTHERS = 0.1
"""Share of the machine from which on a measurement reports that other programs used it."""
_STAT = Path("/proc/stat")
_IDLE = slice(3, 5)
"""The columns ``idle`` and ``iowait``."""
_GUESTS = slice(0, 8)
"""The columns to add, without ``guest`` and ``guest_nice``, which ``user`` and ``nice`` include."""


@dataclass(frozen=True)
class Load:
    """Processor seconds since the machine started, of all its processors and of this process."""

    busy: float
    total: float
    own: float

    @classmethod
    def now(cls) -> Load | None:
        """The current figures, or None if the system does not offer them."""
        try:
            first = _STAT.read_text(encoding="ascii").partition("\n")[0].split()[1:]
        except OSError:
            return None
        ticks = os.sysconf("SC_CLK_TCK")
        columns = [int(value) / ticks for value in first[_GUESTS]]
        return cls(sum(columns) - sum(columns[_IDLE]), sum(columns), time.process_time())

    def others_since(self, earlier: Load | None) -> float | None:
        """The share of all processors' time since ``earlier`` that was neither idle nor this process's. It
        includes other virtual machines' time (``steal``)."""
        total = 0.0 if earlier is None else self.total - earlier.total
        if earlier is None or total <= 0:
            return None
        busy, own = self.busy - earlier.busy, self.own - earlier.own
        return min(1.0, max(0.0, (busy - own) / total))


def used_by_others(since: Load | None) -> float | None:
    """Share of all processors' time from ``since`` until now that others had; None if it is not known."""
    now = Load.now()
    return None if now is None else now.others_since(since)
