"""The messages between trainers and holders in a round."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
