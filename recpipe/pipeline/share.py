"""A trainer's part of a batch: its share of every micro-batch, so that all trainers go through them
together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recpipe.distributed.ranks import Ranks


@dataclass(frozen=True)
class Share:
    """The samples of a batch that one trainer trains, their order and micro-batches."""

    samples: NDArray[np.int64]
    """Positions in the batch, int64 [n]; may be empty."""
    bounds: tuple[int, ...]
    """Where the micro-batches end in ``samples``; some may be empty."""
    cold_from: int
    """Number of the first micro-batch in which a sample of any trainer needs cold rows."""

    @property
    def cold_first(self) -> int:
        """Where that micro-batch begins in ``samples``."""
        return (0, *self.bounds)[self.cold_from]


def cut(
    order: NDArray[np.int64], bounds: tuple[int, ...], needs_cold: NDArray[np.bool_], ranks: Ranks
) -> Share:
    """This rank's share of a batch whose samples come in ``order`` (int64 [B]) in micro-batches that end at
    ``bounds``; ``needs_cold`` [B] is in the batch's own order."""
    starts = (0, *bounds[:-1])
    own = [ranks.shares(low, high)[ranks.trainer] for low, high in zip(starts, bounds, strict=True)]
    cold = [needs_cold[order[low:high]].any() for low, high in zip(starts, bounds, strict=True)]
    return Share(
        np.concatenate([order[part] for part in own]),
        tuple(np.cumsum([part.stop - part.start for part in own]).tolist()),
        int(np.argmax(cold)) if any(cold) else len(bounds),
    )


def in_steps(bounds: tuple[int, ...], step: int) -> tuple[int, ...]:
    """``bounds`` of micro-batches, all but the last rounded down to multiples of ``step``; none is empty."""
    inner = {bound // step * step for bound in bounds[:-1]} - {0, bounds[-1]}
    return (*sorted(inner), bounds[-1])
