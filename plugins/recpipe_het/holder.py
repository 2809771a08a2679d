"""The messages between trainers and holders in a round, and the holder's side: rows in a cold store, their
versions in DRAM beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.kit import updated
from recpipe.plugin import ColdStore, Records, TableOptimizer, distinct

Rows = NDArray[np.int64]
Floats = NDArray[np.float32]
NONE: Rows = np.empty(0, np.int64)
ABSENT = -1
"""The version of a row of which the trainer has no record."""


@dataclass(frozen=True)
class Sums:
    """One vector for each of distinct rows: ``values`` float32 [n, width]; ``updates`` int64 [n]: how many
    local updates are in each."""

    rows: Rows
    updates: Rows
    values: Floats

    @classmethod
    def none(cls, width: int) -> Sums:
        """No rows."""
        return cls(NONE, NONE, np.empty((0, width), np.float32))

    def plus(self, *others: Sums) -> Sums:
        """All rows of these, which must be distinct."""
        parts = [part for part in (self, *others) if len(part.rows)] or [self]
        if len(parts) == 1:
            return parts[0]
        return Sums(
            np.concatenate([part.rows for part in parts]),
            np.concatenate([part.updates for part in parts]),
            np.concatenate([part.values for part in parts]),
        )


@dataclass(frozen=True)
class Push:
    """A trainer's updates of distinct rows. ``gradients`` [n, D]: the holder makes one optimizer step with
    each row's sum. ``steps`` [n, record width]: what the trainer's own steps changed in weights and optimizer
    state; the holder adds it."""

    gradients: Sums
    steps: Sums

    @property
    def rows(self) -> Rows:
        """All its rows, int64 [n]."""
        return np.concatenate((self.gradients.rows, self.steps.rows))

    @property
    def updates(self) -> Rows:
        """The local updates of each of ``rows``, int64 [n]."""
        return np.concatenate((self.gradients.updates, self.steps.updates))

    @property
    def nbytes(self) -> int:
        """Bytes of the vectors, without row numbers."""
        return self.gradients.values.nbytes + self.steps.values.nbytes

    def plus(self, other: Push) -> Push:
        """All rows of both, which must be distinct."""
        return Push(self.gradients.plus(other.gradients), self.steps.plus(other.steps))


@dataclass(frozen=True)
class Check:
    """Distinct rows that a trainer reads; ``versions`` (int64 [n]) of its copies, or ``ABSENT``.

    ``training``: they are those of a training batch, whose missed updates are counted.
    """

    rows: Rows
    versions: Rows
    training: bool = True


@dataclass(frozen=True)
class Reply:
    """The answer to a ``Check``: versions and records (float32 [m, width]) of the rows at ``positions``
    (int64 [m])."""

    positions: Rows
    versions: Rows
    records: Floats


@dataclass(frozen=True)
class Bounds:
    """Rows from ``bases[t]`` to ``bases[t + 1]`` (int64 [T + 1]) may lack up to ``updates[t]`` updates (int64
    [T])."""

    bases: Rows
    updates: Rows

    def of(self, rows: Rows) -> Rows:
        """The bound of each row, int64 [n]."""
        if self.same:
            return np.full(len(rows), self.updates[0])
        return self.updates[np.searchsorted(self.bases, rows, side="right") - 1]

    @cached_property
    def same(self) -> bool:
        """Whether all tables have one bound, so that rows need not be searched."""
        return bool((self.updates == self.updates[0]).all())

    def part(self, index: int, holders: int) -> Bounds:
        """The same bounds for rows numbered within the part of holder ``index``, which has every
        ``holders``-th row."""
        return Bounds(-((index - self.bases) // holders), self.updates)


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


class Holder:
    """Applies pushes and answers checks. Rows are numbered as in ``store``, also those of ``bounds``.

    ``versions`` (int64 [rows]) counts the updates applied to each row. Only rows that are sent or
    updated touch the store. ``missed`` counts what reads miss; None: nobody does.
    """

    def __init__(
        self, store: ColdStore, optimizer: TableOptimizer, dim: int, bounds: Bounds, missed: Missed | None
    ) -> None:
        self.store = store
        self.optimizer = optimizer
        self.dim = dim
        self.bounds = bounds
        self.missed = missed
        self.versions = np.zeros(store.layout.total_rows, np.int64)
        self.applied = 0
        """Sum of ``versions``."""
        self.largest_staleness = 0
        """The most updates applied here that a trainer's line lacked when it was read without a pull."""

    def push(self, pushes: Sequence[tuple[int, Push]], rate: float | None = None) -> None:
        """Apply one round's pushes, each with its trainer's number. A row's gradients are added in the order
        of ``pushes`` and make one optimizer step at ``rate`` (None: that of the recipe); the trainers' own
        steps are added after that."""
        rows = distinct(np.concatenate([push.rows for _, push in pushes]))
        if not len(rows):
            return
        records = self.read(rows)
        parts = [push.gradients for _, push in pushes if len(push.gradients.rows)]
        if parts:
            touched = distinct(np.concatenate([part.rows for part in parts]))
            total = np.zeros((len(touched), self.dim), np.float32)
            for part in parts:
                total[np.searchsorted(touched, part.rows)] += part.values
            at = np.searchsorted(rows, touched)
            sums = torch.from_numpy(total)
            stepped = updated(self.optimizer, torch.from_numpy(records[at]), sums, rate)
            records[at] = stepped.numpy()
        for trainer, push in pushes:
            records[np.searchsorted(rows, push.steps.rows)] += push.steps.values
            pushed, updates = push.rows, push.updates
            self.versions[pushed] += updates
            self.applied += int(updates.sum())
            if self.missed is not None:
                self.missed.pushed(trainer, pushed, updates)
        self.store.scatter(rows, records)

    def pull(self, trainer: int, check: Check) -> Reply:
        """The rows of ``check`` that its trainer lacks, or whose copy there is older than the bound
        allows."""
        behind = self.versions[check.rows] - check.versions
        sent = (check.versions == ABSENT) | (behind > self.bounds.of(check.rows))
        behind[sent] = 0
        self.largest_staleness = max(self.largest_staleness, int(behind.max(initial=0)))
        if self.missed is not None and check.training:
            self.missed.read(trainer, check.rows, behind)
        positions = np.flatnonzero(sent)
        rows = check.rows[positions]
        return Reply(positions, self.versions[rows], self.read(rows))

    def read(self, rows: Rows) -> Records:
        """Records of distinct ``rows``, float32 [n, width]."""
        out = np.empty((len(rows), self.store.layout.width), np.float32)
        if len(rows):
            self.store.gather(rows, out)
        return out
