"""Decides how many batches a group has (as many as memory allows if training waits, otherwise few), and
whether to look ahead at all."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

from recpipe_bagpipe.window import FEW

WAITS, NO_WAITS = 0.02, 0.002
"""Shares of the time from which groups grow, and below which they shrink."""
PATIENCE = 4
"""Groups in a row without waits before they shrink."""
WEIGHED = 16
"""Batches over which the time of a batch is measured, with or without looking ahead ..."""
SETTLING = 4
"""... after so many that do not count: they come right after a change."""
HIDDEN = 0.1
"""The share of the time up to which training may wait for bulk reads, or else looking ahead is not doubted:
the store is what limits it, and reads for many batches are its cheapest ones."""
WORTH = 0.97
"""Looking ahead ends if a batch without it takes less than this share of the time of one with it."""
HOPELESS = 1.5
"""The trial ends with the first batches that take so many times as long."""
HOLD = 250
"""Batches for which that decision holds, at first; each trial doubles them."""
MOST = 256
"""Batches of a group at most."""


class Pace:
    """The batches of a group, and how much training waits for the store.

    Args:
        fixed: batches of a group; None: decided here, while the run goes on.
        memory: bytes that waiting batches and rows on their way may take where ``fixed`` is None.
        record_bytes: bytes of a row on its way.
        waited: the seconds that training has waited for the store so far.
    """

    def __init__(
        self,
        fixed: int | None,
        memory: int,
        record_bytes: int,
        waited: Callable[[], float],
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.fixed, self.memory, self.record_bytes = fixed, memory, record_bytes
        self.wanted = MOST
        """Batches that a group would have without a bound on memory."""
        self.largest = 0
        """The most batches that memory and waits have allowed."""
        self.calm_at: int | None = None
        """How many groups had passed when groups first shrank."""
        self.single = False
        """Whether nothing is read ahead: batches are trained sooner without."""
        self.with_it = self.without = 0.0
        """Seconds of a batch with looking ahead and without it, as last measured; 0 before."""
        self._waited, self._clock = waited, clock
        self._trying = False
        self._hold, self._next_hold, self._settling = 0, HOLD, SETTLING
        self._weighed = 0
        self._times: list[float] = []
        self._shares: list[float] = []
        self._calm = self._groups = 0
        self._cold_bytes = 0.0
        self._patience = PATIENCE
        self._before = (clock(), waited())

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

    def note(self, batches: int, single: bool) -> None:
        """Judge the group of ``batches`` that has just been trained, ``single`` or read ahead."""
        now, waited = self._clock(), self._waited()
        seconds, waits = max(1e-9, now - self._before[0]), waited - self._before[1]
        self._before = now, waited
        if self.fixed is not None:
            return
        self._weigh(batches, single, seconds, waits)
        if not single:
            self._resize(waits / seconds)

    def _weigh(self, batches: int, single: bool, seconds: float, waits: float) -> None:
        """Try how long batches take without looking ahead, and go on with what is faster."""
        self._hold -= batches
        if single != self.single:  # read before the change
            return
        if self._trying and seconds / batches > HOPELESS * self.with_it:
            self._decide(seconds / batches)
            return
        if self._settling > 0:
            self._settling -= batches
            return
        self._weighed += batches
        self._times.append(seconds / batches)
        self._shares.append(waits / seconds)
        if self._weighed < WEIGHED or len(self._times) < 3:
            return
        # The median: an evaluation or a checkpoint may lie within a group.
        each, share = median(self._times), median(self._shares)
        self._weigh_anew()
        if self._trying:
            self._decide(each)
        elif self.single:
            self._change(self._hold > 0)
        else:
            self.with_it = each
            if self._hold <= 0 and share < HIDDEN:
                self._trying = True
                self._change(True)

    def _decide(self, without: float) -> None:
        """End a trial, in which batches took ``without`` seconds each."""
        self.without = without
        self._weigh_anew()
        self._trying, self._hold, self._next_hold = False, self._next_hold, 2 * self._next_hold
        self._change(without < WORTH * self.with_it)

    def _weigh_anew(self) -> None:
        self._weighed, self._times, self._shares = 0, [], []

    def _change(self, single: bool) -> None:
        if single != self.single:
            self.single, self._settling = single, SETTLING

    def _resize(self, share: float) -> None:
        """Longer or shorter groups after one in which training waited for this share of the time."""
        self._groups += 1
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

    @property
    def off(self) -> bool:
        """Whether a trial has ended looking ahead."""
        return self.single and not self._trying

    @property
    def shrunk(self) -> bool:
        """Whether groups are shorter than memory would allow, because nothing is waited for."""
        return self.wanted < min(MOST, max(FEW + 1, self.largest))
