"""What separating hot and cold mini-batches can gain at most, estimated on a stretch of the epoch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from recpipe.plugin import Bags, Context, RowIds
from recpipe_fae.classify import hot_samples, residents, sample_of

SHARE, LEAST, MOST = 0.05, 16, 64
"""The stretch is this share of the epoch's batches, within these numbers of batches."""
WORTH = 1.05
"""Mini-batches are separated only if that can make training this many times as fast."""


@dataclass(frozen=True)
class Estimate:
    """Shares found on a stretch of consecutive batches."""

    hot_input_share: float
    hot_access_share: float
    fetch_share: float
    """Cold rows that cold mini-batches would fetch, as a share of what mixed ones fetch; 1 if none is."""

    @property
    def bound(self) -> float:
        """The speedup that fewer fetches allow, if training did nothing but fetch."""
        return 1 / self.fetch_share

    @property
    def can_pay(self) -> bool:
        """Whether separating could gain anything worth having."""
        return self.hot_input_share > 0 and self.bound >= WORTH


def estimate(ctx: Context, hot_rows: RowIds) -> Estimate:
    """Read a stretch of the epoch, at a place chosen with the run's seed, and compare the distinct cold rows
    of its batches with those of mini-batches that hold only its cold samples."""
    batches = max(1, -(-ctx.epoch_samples // ctx.batch_size))
    first, length = stretch(batches, ctx.seed)
    read = map(ctx.lookups, islice(ctx.batches(first), length))
    return estimated(read, residents(ctx, hot_rows), ctx.batch_size)


def stretch(batches: int, seed: int) -> tuple[int, int]:
    """The first batch of the stretch, and how many it has, in an epoch of so many ``batches``."""
    length = min(batches, max(LEAST, min(MOST, round(SHARE * batches))))
    return int(np.random.default_rng((seed, 1)).integers(batches - length + 1)), length


def estimated(stretch: Iterable[Bags], resident: NDArray[np.bool_], batch_size: int) -> Estimate:
    """Compare the distinct cold rows of a stretch's batches with those of mini-batches that hold only its
    cold samples; ``resident`` [rows]: whether a row is hot."""
    samples = hot = lookups = hits = mixed = 0
    ordinals, rows = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for bags in stretch:
        found = resident[bags.rows]
        is_hot = hot_samples(bags, found)
        cold_rows = bags.rows[~found]
        ordinal = samples - hot + np.cumsum(~is_hot) - 1  # of a cold sample among those of the stretch
        ordinals.append(ordinal[sample_of(bags)[~found]])
        rows.append(cold_rows)
        mixed += len(np.unique(cold_rows))
        samples, hot = samples + len(is_hot), hot + int(is_hot.sum())
        lookups, hits = lookups + len(found), hits + int(found.sum())
    separated = _fetched(np.concatenate(ordinals), np.concatenate(rows), samples - hot, batch_size)
    share = min(1.0, separated / mixed) if mixed else 1.0
    return Estimate(hot / max(1, samples), hits / max(1, lookups), share)


def _fetched(ordinals: NDArray[np.int64], rows: RowIds, samples: int, size: int) -> float:
    """Distinct rows of each mini-batch of ``size`` cold samples, summed. A short last one counts like the
    others, since the epoch would fill it."""
    if not samples:
        return 0.0
    whole = samples // size * size or samples
    inside = ordinals < whole
    pairs = np.stack((ordinals[inside] // size, rows[inside]))
    return len(np.unique(pairs, axis=1).T) * samples / whole
