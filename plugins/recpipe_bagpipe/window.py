"""For a single trainer: the oracle. It reads batches ahead of training and knows every row's next use.

A thread reads. Batches whose rows are read from the store together are a group. The first groups have 1, 2,
4, 8 ... batches, so that training starts when the first batch's rows are there; later ones have as many as
asked for. A group ends early if its rows would fill half of the slots, since those of two groups are needed
at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

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
