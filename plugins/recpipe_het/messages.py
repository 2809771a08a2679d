"""The messages between trainers and holders in a round."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]
Floats = NDArray[np.float32]
ABSENT = -1
"""The version of a row of which the trainer has no record."""


@dataclass(frozen=True)
class Push:
    """Gradients of distinct rows. ``gradients`` float32 [n, D]; ``updates`` int64 [n]: how many local updates
    are in each sum."""

    rows: Rows
    updates: Rows
    gradients: Floats

    @classmethod
    def of(cls, dim: int, parts: list[Push]) -> Push:
        """Join ``parts``, whose rows are distinct."""
        none = np.empty(0, np.int64)
        return cls(
            np.concatenate([none, *(p.rows for p in parts)]),
            np.concatenate([none, *(p.updates for p in parts)]),
            np.concatenate([np.empty((0, dim), np.float32), *(p.gradients for p in parts)]),
        )


@dataclass(frozen=True)
class Check:
    """Distinct rows that a trainer reads; ``versions`` (int64 [n]) of its copies, or ``ABSENT``."""

    rows: Rows
    versions: Rows


@dataclass(frozen=True)
class Reply:
    """The answer to a ``Check``: versions and records (float32 [m, width]) of the rows at ``positions``
    (int64 [m])."""

    positions: Rows
    versions: Rows
    records: Floats
