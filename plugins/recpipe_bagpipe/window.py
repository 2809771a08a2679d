"""For a single trainer: the oracle. It reads batches ahead of training and knows every row's next use.

A thread reads. Batches whose rows are read from the store together are a group. The first groups have 1, 2,
4, 8 ... batches, so that training starts when the first batch's rows are there; later ones have as many as
asked for. A group ends early if its rows would fill half of the slots, since those of two groups are needed
at a time. ``Pace`` says how many batches a group has (as many as memory allows if training waits, otherwise
few), and whether to look ahead at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from statistics import median
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from recpipe.plugin import Batch
from recpipe_bagpipe.reading import ReadAhead, Waiting
from recpipe_bagpipe.uses import UNKNOWN, Small, in_group, shared

Rows = NDArray[np.int64]
Steps = NDArray[np.int32]
NO_ROWS: Rows = np.empty(0, np.int64)
ROW_BYTES = 12
"""What a group takes for each row that a batch looks up, about."""
FEW = 2
"""Batches of a group where nothing is waited for."""


@dataclass
class Group:
    """Batches whose rows are read together. Batches are counted from the stream's first one."""

    first: int
    """Number of its first batch."""
    sizes: list[int]
    """How many distinct rows each batch looks up."""
    looked_up: Small
    """These rows, batch after batch, sorted within each."""
    next_use: Steps
    """For each of ``looked_up``, the next known batch that looks the row up."""
    rows: Small
    """All rows of the group, sorted; none if its batches were not looked into and read theirs themselves."""
    ends: Steps
    """For each of ``rows``, the position in ``looked_up`` of its last lookup."""
    again: tuple[Rows, Steps]
    """Positions in ``looked_up`` of the group before whose next use is in this one, and these uses."""
    new: tuple[Rows, Steps]
    """Those ``rows`` that the group before does not look up, and their first uses."""

    def __post_init__(self) -> None:
        own = (self.looked_up, self.next_use, self.rows, self.ends, *self.again, *self.new)
        self.nbytes = sum(part.nbytes for part in own)
        self.end = self.first + len(self.sizes)
        """The number of the batch after the last."""
        self.single = not len(self.rows)

    def of(self, number: int) -> tuple[Small, Steps]:
        """The rows of batch ``number`` and their next uses."""
        start = sum(self.sizes[: number - self.first])
        part = slice(start, start + self.sizes[number - self.first])
        return self.looked_up[part], self.next_use[part]

    def link(self, later: Group) -> None:
        """Fill in the next uses that ``later`` tells, the group that follows this one."""
        places, steps = later.again
        self.next_use[places] = steps


def group_of(batches: list[Rows], before: Group | None) -> Group:
    """The group of ``batches``, each given by its distinct rows, that follows ``before``."""
    first = 0 if before is None else before.end
    sizes = [len(rows) for rows in batches]
    looked_up: Small = np.concatenate(batches)
    if len(looked_up) and looked_up.max() < UNKNOWN:
        looked_up = looked_up.astype(np.int32)
    order = np.argsort(looked_up, kind="stable")  # by row, then by batch; it merges the sorted batches
    next_use, rows, first_use, ends = in_group(looked_up, order, np.array(sizes, np.int64), first)
    there = (NO_ROWS, NO_ROWS.astype(np.int32)) if before is None else (before.rows, before.ends)
    again, new = shared(*there, rows, first_use)
    return Group(first, sizes, looked_up, next_use, rows, ends, again, new)


def _union(parts: list[Rows]) -> Rows:
    """The distinct values of sorted ``parts``, sorted."""
    ordered = np.concatenate(parts)
    ordered.sort(kind="stable")  # it merges them
    first = np.ones(len(ordered), bool)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return ordered[first]


class Window(ReadAhead):
    """One stream: ``batches`` yields its batches to training, ``next`` the groups that they are in.

    Different threads read the two.
    """

    def __init__(
        self,
        source: Iterator[Batch],
        rows_of: Callable[[Batch], Rows],
        size: Callable[[int], int],
        slots: int,
        single: Callable[[], bool] = lambda: False,
    ) -> None:
        """``rows_of``: the distinct rows that a batch looks up, sorted. ``size``: told the bytes that a batch
        takes while it waits, says how many batches a group has now. ``slots``: how many rows can be resident.
        ``single``: whether the next group's batches shall pass without being looked into."""
        super().__init__(source)
        self._rows_of, self._size, self._slots = rows_of, size, slots
        self._single = single
        self._left: Batch | None = None
        """A batch that did not fit its group; the next one begins with it."""
        self._groups: deque[Group] = deque()
        self._asked = 0
        """The number of groups that ``next`` was asked for."""
        self._made = 0

    def next(self) -> Group | None:
        """The next group; waits for it. None at the end of the stream."""
        with self._changed:
            self._asked += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._groups or self._done)
            if self._groups:
                return self._groups.popleft()
            self._check()
            return None

    def forget(self, group: Group) -> None:
        """Note that ``group`` is not used any more."""
        with self._changed:
            self._bytes -= group.nbytes

    def _read(self) -> None:
        batches, rows = self._known(1)  # even where others are not: a resumed run is told by the first batch
        group, wanted = None, 2
        while batches:
            group = group_of(rows, group)
            with self._changed:
                self._made += 1
                self._batches.extend(batches)
                self._groups.append(group)
                self._take(group.nbytes)
                self._changed.notify_all()
                # Read on once this group was asked for, or if no batch waits to be trained.
                self._changed.wait_for(
                    lambda: self._made <= self._asked or not self._batches or self._stopped
                )
            if self._single():
                batches = [self._waits(batch, small=False) for batch in islice(self._unread(), FEW)]
                rows = [NO_ROWS] * len(batches)
            else:
                batches, rows = self._known(wanted)
                wanted *= 2 if len(batches) == wanted else 1

    def _known(self, wanted: int) -> tuple[list[Waiting], list[Rows]]:
        """The next group's batches and their rows: at most ``wanted``, and as many as may be."""
        batches: list[Waiting] = []
        rows: list[Rows] = []
        parts: list[Rows] = []
        """Sorted, and together all of ``rows``; their union is found when they may be too many."""
        for batch in self._unread():
            mine = self._rows_of(batch)
            parts.append(mine)
            if rows and sum(map(len, parts)) > self._slots // 2:
                parts = [_union(parts)]
                if len(parts[0]) > self._slots // 2:
                    self._left = batch
                    break
            batches.append(self._waits(batch))
            rows.append(mine)
            if len(batches) >= min(wanted, self._size(batches[-1].nbytes + ROW_BYTES * len(mine))):
                break
        return batches, rows

    def _unread(self) -> Iterator[Batch]:
        """The batch that was left, then those of the source."""
        while not self._stopped:
            batch, self._left = self._left, None
            if batch is None and (batch := next(self._source, None)) is None:
                return
            yield batch


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
