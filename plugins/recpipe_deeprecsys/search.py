"""DeepRecSched's search: how requests are best cut, put together and spread, climbing one axis after another.

Gupta et al., ISCA 2020, https://arxiv.org/abs/2001.02772, climbs over the size of parts from the largest on
until a size is worse than the one before; here it goes on over whether requests are put together, the time
that batches wait and processes, and round again until no step on any axis is better.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from recpipe_deeprecsys.bounded import bisected, is_good
from recpipe_deeprecsys.engine import Batching
from recpipe_deeprecsys.load import SERVER, Load, Outcome, Target

SMALLEST = 16
"""Candidates of the smallest parts that are tried."""
WAITS = (1 / 32, 1 / 16, 1 / 8, 1 / 4)
"""How long batches that are not full wait, as shares of the bound, beside not at all."""
TOGETHER = 2, 4
"""Largest requests that are put together at most, where requests are put together."""
STATIC = 25
"""Candidates of a part in DeepRecSys's own baseline: its largest request has 1000, and its servers have 40
cores, over which that is split evenly; so are all others cut."""
Axes = Mapping[str, Sequence[float]]
"""The values of each field of ``Batching`` that is searched, ascending."""
Measure = Callable[[Batching, float], float | None]
"""The largest valid rate of a batching if it is above a floor; None: it is not."""


@dataclass(frozen=True)
class Tried:
    """A batching that was measured. ``rate``: its largest valid one; None: it is not above ``floor``."""

    batching: Batching
    rate: float | None
    floor: float


def axes_of(
    start: Batching, largest: int, bound_ms: float, smallest: int = SMALLEST, together: Sequence[bool] = ()
) -> Axes:
    """What is searched around ``start``, whose workers are the most there are, for requests of up to
    ``largest`` candidates, from batches of ``smallest`` on. ``together``: whether requests may be put
    together; as ``start`` has it if empty."""
    merges = sorted(together or {start.merge})
    sizes = {start.batch, largest, *(largest * times for times in TOGETHER if True in merges)}
    size = smallest
    while size < largest:
        sizes.add(size)
        size *= 2
    waits = {0.0, start.wait_ms, *(bound_ms * share for share in WAITS)}
    return {
        "batch": sorted(sizes),
        "merge": merges,
        "wait_ms": sorted(waits) if True in merges else [0.0],
        "workers": range(1, start.workers + 1),
    }


def searched(
    start: Batching, axes: Axes, measure: Measure, fitted: Callable[[Batching], Batching] = lambda one: one
) -> list[Tried]:
    """All that was tried, ``start`` first; the best one is ``best_of``. ``fitted``: a batching with what
    follows from the fields that are searched."""
    tried = [Tried(start, measure(start, 0.0), 0.0)]
    best, rate, moved = start, tried[0].rate or 0.0, True
    seen = {start}
    while moved:
        moved = False
        for axis, values in axes.items():
            for step in (-1, 1):
                while (found_one := _beside(best, axis, values, step)) is not None:
                    next_one = fitted(found_one)
                    if next_one in seen:
                        break
                    seen.add(next_one)
                    found = measure(next_one, rate)
                    tried.append(Tried(next_one, found, rate))
                    if found is None or found <= rate:
                        break
                    best, rate, moved = next_one, found, True
    return tried


def best_of(tried: Sequence[Tried]) -> Tried:
    """The one with the largest valid rate."""
    return max(tried, key=lambda one: one.rate or 0.0)


def _beside(batching: Batching, axis: str, values: Sequence[float], step: int) -> Batching | None:
    """One step further on an axis; None at its end."""
    place = values.index(getattr(batching, axis)) + step
    if not 0 <= place < len(values):
        return None
    changed: dict[str, Any] = {axis: values[place]}
    return replace(batching, **changed)


def measuring(
    use: Callable[[Batching], Target],
    load: Load,
    tolerance: float,
    first: float,
    say: Callable[[Outcome], None],
) -> Measure:
    """Measures a batching by what ``use`` makes of it. One that is not valid at a rate above the floor by
    ``tolerance`` is not looked at further. ``first``: the rate that is tried where there is no floor."""

    def measure(batching: Batching, floor: float) -> float | None:
        target = use(batching)

        def good(outcome: Outcome) -> bool:
            return is_good(outcome, load)

        def run(rate: float) -> Outcome:
            outcome = load.run(target, SERVER, rate)
            say(outcome)
            return outcome

        if floor:
            begin = floor * (1 + tolerance)
            found = bisected(run, begin, good, tolerance, near=True, least=begin)
        else:
            found = bisected(run, first, good, tolerance)
        return max((outcome.rate or 0.0 for outcome in found if good(outcome)), default=None)

    return measure
