"""Copies of the rows that have changed, for a delta: most of them are made in parts, after the steps before
the one at which the delta is due, so that no step waits for all. Rows that change again are copied again, and
of each the latest copy counts: a delta has the rows as they are after the step at which it is due. As when a
virtual machine moves while it runs, each pass over all rows is faster than the one before and leaves less:
the last copy has what about one step has changed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from recpipe.setup.training import Training
from recpipe.tables.changes import ChangedRows
from recpipe.tables.collection import ReadsRows

LEAST, MOST = 8, 64
"""Parts of the first pass."""
OF_A_STEP = 0.25
"""The time of a step that copying a part should not exceed."""
Piece = tuple[NDArray[np.int64], NDArray[np.float32]]
"""Rows of a group, ascending, int64 [n], and their weights, float32 [n, D]."""
Pieces = list[list[Piece]]
"""Of each group, in the order in which they were copied."""


class Copies:
    """The copies of rows that ``changes`` has noted, of each group of tables of ``training``. All trainers
    make them together."""

    def __init__(self, training: Training, changes: Sequence[ChangedRows | None]) -> None:
        self.training, self.changes = training, changes
        self.trainers = training.module.trainers
        self._turns = turns(LEAST)
        self._made: Pieces = [[] for _ in changes]
        self._next = 0

    @property
    def full(self) -> bool:
        """Whether all passes have been made: then what changes is left for the last copy."""
        return self._next >= len(self._turns)

    def make_part(self, parts: int) -> None:
        """Copy what has changed in the next part of all rows, in passes of which the first has so many
        ``parts``."""
        if self._next == 0:
            self._turns = turns(parts)
        number, of = self._turns[self._next]
        self._next += 1
        for group, changes in enumerate(self.changes):
            if changes is not None:
                low, high = (changes.size * end // of for end in (number, number + 1))
                self._copy(group, changes, low, high)

    def take(self) -> Pieces:
        """All copies, with what has changed since they were made."""
        for group, changes in enumerate(self.changes):
            if changes is not None:
                self._copy(group, changes, 0, changes.size)
        made, self._made, self._next = self._made, [[] for _ in self.changes], 0
        return made

    def _copy(self, group: int, changes: ChangedRows, low: int, high: int) -> None:
        rows = changes.taken(low, high)
        if self.trainers.size > 1:
            rows = np.unique(np.concatenate(self.trainers.gather(rows)))
        if len(rows):
            reader = self.training.model.embeddings.collections[group].offers(ReadsRows)
            assert reader is not None, "it has been checked"
            self._made[group].append((rows, reader.weights_of(rows)))


def latest(pieces: Sequence[Piece]) -> Piece | None:
    """The rows of all ``pieces``, once each, as they were copied last; None if there are none."""
    if len(pieces) < 2:
        return pieces[0] if pieces else None
    rows, weights = (np.concatenate(each) for each in zip(*pieces[::-1], strict=True))
    found, first = np.unique(rows, return_index=True)
    return found, weights[first]


def turns(parts: int) -> list[tuple[int, int]]:
    """The parts to copy, one after each step, as a number and of how many parts: passes over all rows of
    ``parts``, of half as many, and so on to halves. A part is twice as large in each pass, of which half as
    many steps have changed rows since the pass before. At most 2 x ``parts`` - 1."""
    found = [(number, parts) for number in range(parts)]
    return found + turns(parts // 2) if parts > 3 else found


def parts_for(copying: float, step: float) -> int:
    """How many parts make a copy that takes so many seconds short beside a ``step`` of so many."""
    return int(min(MOST, max(LEAST, np.ceil(copying / max(OF_A_STEP * step, 1e-9)))))
