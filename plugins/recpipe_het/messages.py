"""What trainers and holders tell each other in a round."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]
Floats = NDArray[np.float32]
ABSENT = -1
"""Version of a row that the trainer has no record of."""


@dataclass(frozen=True)
class Push:
    """Gradients of distinct rows. ``gradients`` float32 [n, D]; ``updates`` int64 [n]: how many local
    updates each sums up."""

    rows: Rows
    updates: Rows
    gradients: Floats

    @classmethod
    def of(cls, dim: int, parts: list[Push]) -> Push:
        """``parts``, whose rows are distinct, in one."""
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
    """Of a ``Check``, rows ``positions`` (int64 [m]) with versions and records (float32 [m, width])."""

    positions: Rows
    versions: Rows
    records: Floats
