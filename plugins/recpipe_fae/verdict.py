"""Whether separating hot and cold mini-batches pays, from measured steps; and the report's sentence on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from recpipe.kit import milliseconds
from recpipe_fae.estimate import Estimate

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
