"""Decides how many batches a group has: as many as memory allows if training waits, otherwise few."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from recpipe_bagpipe.window import FEW

WAITS, NO_WAITS = 0.02, 0.002
"""Shares of the time from which groups grow, and below which they shrink."""
PATIENCE = 4
"""Groups in a row without waits before they shrink."""
IDLE, BUSY = 0.15, 0.3
"""Shares of the time that the store is in use: below the first nothing is read ahead, above the second it is
again."""
IDLE_GROUPS = 2
"""Groups in a row with an idle store before nothing is read ahead."""
MOST = 256


class Pace:
    """The batches of a group, and how much training waits for the store.

    Args:
        fixed: batches of a group; None: decided here, while the run goes on.
        memory: bytes that waiting batches and rows on their way may take where ``fixed`` is None.
        record_bytes: bytes of a row on its way.
        waited: the seconds that training has waited for the store so far.
        busy: the seconds that the store has read and written so far.
    """

    def __init__(
        self,
        fixed: int | None,
        memory: int,
        record_bytes: int,
        waited: Callable[[], float],
        busy: Callable[[], float],
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.fixed, self.memory, self.record_bytes = fixed, memory, record_bytes
        self.wanted = MOST
        """Batches that a group would have without a bound on memory."""
        self.least = self.largest = 0
        """The fewest and the most batches that memory and waits have allowed."""
        self.calm_at: int | None = None
        """How many groups had passed when groups first shrank."""
        self.single = False
        """Whether nothing is read ahead: the store is idle most of the time."""
        self.share = 1.0
        """The share of the last group's time that the store was in use."""
        self._waited, self._busy, self._clock = waited, busy, clock
        self._idle, self._idle_wanted = 0, IDLE_GROUPS
        self._calm = self._groups = 0
        self._cold_bytes = 0.0
        self._patience = PATIENCE
        self._before = (clock(), waited(), busy())

    def batches(self, batch_bytes: int) -> int:
        """How many batches the next group has, if each takes ``batch_bytes`` while it waits."""
        if self.fixed is not None:
            return self.fixed
        # Two groups' batches wait and a third is being read; rows of two are on their way.
        room = int(self.memory // (3 * batch_bytes + 2 * self._cold_bytes + 1))
        now = max(1, min(room, self.wanted))
        self.largest = max(self.largest, now)
        return now

    def announced(self, rows: int, batches: int) -> None:
        """Note that a group of ``batches`` reads ``rows``."""
        self._cold_bytes = rows * self.record_bytes / batches

    def note(self) -> None:
        """Judge the group that has just been trained."""
        now, waited, busy = self._clock(), self._waited(), self._busy()
        seconds = max(1e-9, now - self._before[0])
        share, self.share = (waited - self._before[1]) / seconds, (busy - self._before[2]) / seconds
        self._before = now, waited, busy
        self._groups += 1
        if self.fixed is None:
            self._judge_store(share)
        if share > WAITS:
            if self.wanted < MOST:
                self._patience *= 2  # it had shrunk too early
            self.wanted, self._calm = min(MOST, 2 * self.wanted), 0
        elif share < NO_WAITS:
            self._calm += 1
            if self._calm >= self._patience and self.wanted > FEW:
                self.wanted, self._calm = max(FEW, min(self.wanted, self.largest) // 2), 0
                self.calm_at = self.calm_at or self._groups
        else:
            self._calm = 0

    def _judge_store(self, waits: float) -> None:
        """Read ahead no more, or again."""
        if waits > WAITS or self.share > BUSY:
            if self.single:
                self._idle_wanted *= 2  # it was too early
            self.single, self._idle = False, 0
        else:
            self._idle = self._idle + 1 if self.share < IDLE else 0
            self.single = self.single or self._idle >= self._idle_wanted

    @property
    def shrunk(self) -> bool:
        """Whether groups are shorter than memory would allow, because nothing is waited for."""
        return self.fixed is None and self.wanted < min(MOST, max(FEW + 1, self.largest))
