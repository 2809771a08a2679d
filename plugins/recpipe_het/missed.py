"""Counts the updates that reads miss."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recpipe_het.messages import NONE, Rows


@dataclass
class MissedTotals:
    """Over all reads of training batches; a batch reads each of its distinct rows once."""

    reads: int = 0
    missing: int = 0
    """Reads that missed at least one update."""
    updates: int = 0
    """Sum of the updates that they missed."""
    largest: int = 0

    def plus(self, other: MissedTotals) -> MissedTotals:
        """Totals of both together."""
        return MissedTotals(
            self.reads + other.reads,
            self.missing + other.missing,
            self.updates + other.updates,
            max(self.largest, other.largest),
        )


class Missed:
    """What reads of a holder's rows miss: the updates that other trainers have made and not pushed, and those
    that were pushed and that the reader's line lacks.

    The holder knows a trainer's updates without being told their rows: they are of the rows that it read
    last. A trainer only says how many updates it has made of that batch. ``waiting`` (int32 [trainers, rows])
    has each trainer's updates of each row that it has not pushed.
    """

    def __init__(self, trainers: int, rows: int) -> None:
        self.waiting = np.zeros((trainers, rows), np.int32)
        self.totals = MissedTotals()
        self._read: list[Rows] = [NONE] * trainers

    def made(self, trainer: int, updates: int) -> None:
        """The trainer has made ``updates`` of each row that it read last."""
        if updates:
            self.waiting[trainer, self._read[trainer]] += updates

    def pushed(self, trainer: int, rows: Rows, updates: Rows) -> None:
        """The trainer has pushed so many ``updates`` of each of ``rows``."""
        self.waiting[trainer, rows] -= updates.astype(np.int32)

    def read(self, trainer: int, rows: Rows, behind: Rows) -> None:
        """The trainer reads distinct ``rows`` in a training batch; its records lack the last ``behind``
        (int64 [n]) of the updates that the holder has applied."""
        self._read[trainer] = rows
        waiting = self.waiting[:, rows]
        missed = behind + waiting.sum(axis=0) - waiting[trainer]
        totals = self.totals
        totals.reads += len(rows)
        totals.missing += int(np.count_nonzero(missed))
        totals.updates += int(missed.sum())
        totals.largest = max(totals.largest, int(missed.max(initial=0)))
