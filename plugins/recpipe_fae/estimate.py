"""Whether separating hot and cold mini-batches pays: what it can gain at most, estimated on a stretch of the
epoch before training; what measured steps say; and the report's sentence on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import median

import numpy as np
from numpy.typing import NDArray

from recpipe.kit import milliseconds
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
    separated, cold = 0.0, samples - hot
    if cold:
        # Distinct rows of each mini-batch of cold samples, summed. A short last one counts like the others,
        # since the epoch would fill it.
        whole = cold // batch_size * batch_size or cold
        of_sample = np.concatenate(ordinals)
        inside = of_sample < whole
        pairs = np.stack((of_sample[inside] // batch_size, np.concatenate(rows)[inside]))
        separated = len(np.unique(pairs, axis=1).T) * cold / whole
    share = min(1.0, separated / mixed) if mixed else 1.0
    return Estimate(hot / max(1, samples), hits / max(1, lookups), share)


COLD, HOT, MIXED = range(3)
"""Kinds of mini-batches."""


KEPT = 512
"""How many of a kind's newest steps are kept."""


Steps = tuple[Sequence[float], ...]
"""Seconds of steps, by kind."""


@dataclass(frozen=True)
class Expected:
    """What a batch of the data's order would take, and what its samples take in separate mini-batches."""

    mixed: float
    separate: float

    @property
    def gain(self) -> float:
        """The speedup by separating."""
        return self.mixed / self.separate


def typical(steps: Sequence[float]) -> float | None:
    """The median of the later half, when rows that move in at first have done so; None without steps."""
    late = list(steps)[len(steps) // 2 :]
    return median(late) if late else None


def expected(steps: Steps, estimate: Estimate) -> Expected | None:
    """From the steps of both kinds; None if one of them was not measured.

    A hot step is training alone. Where a cold step is not longer, its fetches were hidden. Where it is, it
    takes as long as its fetches; a mixed batch has fewer cold samples but would fetch some rows more often,
    as the estimate says, and cannot be faster than a hot one.
    """
    cold, hot = typical(steps[COLD]), typical(steps[HOT])
    if cold is None or hot is None:
        return None
    share = estimate.hot_input_share
    mixed = max(hot, (1 - share) * cold / estimate.fetch_share)
    return Expected(mixed, share * hot + (1 - share) * cold)


def sentence(phases: str, separates: bool, stopped: bool, steps: Steps, estimate: Estimate) -> str:
    """Whether separating paid, and why. ``stopped``: a trial ended it."""
    hot = f"{100 * estimate.hot_input_share:.1f}% of the inputs are hot"
    if phases == "never":
        return f"mini-batches were not separated, as asked for; the hot rows are a plain cache, and {hot}"
    if not separates:
        if estimate.hot_access_share == 1:
            why = "no cold row is fetched"
        else:
            why = (
                f"cold mini-batches would fetch {100 * estimate.fetch_share:.0f}% of the rows that mixed "
                f"ones fetch, so it could gain {100 * (estimate.bound - 1):.0f}% at most"
            )
        return f"mini-batches were not separated, and samples not classified: {hot}, and {why}"
    found = expected(steps, estimate)
    if found is None:
        return f"mini-batches were separated, without steps of both kinds to judge it by; {hot}"
    cold, alone = typical(steps[COLD]), typical(steps[HOT])
    assert cold is not None
    assert alone is not None
    times = f"a cold step took {milliseconds(cold)} ms, a hot one {milliseconds(alone)}"
    mixed = milliseconds(found.mixed)
    means = f"{milliseconds(found.separate)} ms on average, where mixed ones would take {mixed}"
    if stopped:
        real = typical(steps[MIXED])
        then = "" if real is None else f", and took {milliseconds(real)}"
        return f"separating ended after a trial: {times}, {means}{then}; {hot}"
    paid = "paid" if found.gain >= 1 else "did not pay"
    return f"separating {paid}: {times}, {means} by estimate; {hot}"
