"""The largest rate of requests whose latency stays within a bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from recpipe_deeprecsys.load import OFFLINE, SERVER, SINGLE_STREAM, Load, Outcome, Target

BEGIN = 0.7
"""The first rate, as a share of what the target takes offline."""
UP, DOWN = 1.3, 0.6
"""What the rate is multiplied by until one rate is valid and another is not."""
NEAR = 1.12, 0.88
"""And where the largest one is known about."""
AGAIN = 2
"""Runs at a rate that must all be bad before it counts as bad: a single one may have been disturbed."""
KEEPS_UP = 0.9
"""Which share of the requests that come in a second must be answered in one: what is left when the last one
has come is answered later."""
MOST = 16
"""Runs until then."""
LEAST = 0.1
"""The smallest rate that is tried, as a share of what the target takes offline: below it LoadGen's fewest
requests take minutes to come."""
Run = Callable[[float], Outcome]
"""A run of the server at a rate."""


@dataclass(frozen=True)
class Bounded:
    """What was measured of a target. ``best``: the run at the largest valid rate; None: none was valid."""

    single: Outcome
    offline: Outcome
    tried: tuple[Outcome, ...]
    best: Outcome | None
    why: str | None = None
    """Why there is no valid rate."""


def is_good(outcome: Outcome, load: Load) -> bool:
    """Whether LoadGen calls a run valid, its percentile is within the bound, and the server kept up."""
    kept_up = outcome.completed >= KEEPS_UP * outcome.scheduled
    return outcome.valid and outcome.latency_ms[load.percentile] <= load.bound_ms and kept_up


def bisected(
    run: Run,
    first: float,
    good: Callable[[Outcome], bool],
    tolerance: float,
    near: bool = False,
    least: float = 0.0,
) -> list[Outcome]:
    """Runs, from the rate ``first`` on, until a good and a bad rate differ by at most ``tolerance``, relative
    to the good one. Where no rate is good, down to the rate ``least``, and ``MOST`` runs. ``near``: whether
    the largest good rate is about the first one. A rate that may be good by all that is known is bad once
    ``AGAIN`` runs are, of which the last is told."""
    tried: list[Outcome] = []
    low, high, rate = 0.0, float("inf"), first
    up, down = NEAR if near else (UP, DOWN)
    while low or (len(tried) < MOST and (rate >= least or not tried)):
        outcome = run(rate)
        for _ in range(AGAIN - 1 if low or near else 0):
            if not good(outcome):
                outcome = run(rate)
        tried.append(outcome)
        if good(outcome):
            low = max(low, rate)
        else:
            high = min(high, rate)
        if high <= low * (1 + tolerance) or (len(tried) >= MOST and high == float("inf")):
            break
        rate = rate * up if high == float("inf") else (low + high) / 2 if low else rate * down
    return tried


def measured(
    target: Target,
    load: Load,
    tolerance: float,
    say: Callable[[Outcome], None],
    near: float | None = None,
) -> Bounded:
    """The latency of single requests, the throughput offline, and the largest rate of a server. ``say`` is
    told of each run. ``near``: about the largest rate, if it is known."""

    def run(scenario: str, rate: float | None = None) -> Outcome:
        outcome = load.run(target, scenario, rate)
        say(outcome)
        return outcome

    single = run(SINGLE_STREAM)
    # A run of about so many seconds; the rate by which it is made so long is not known before.
    offline = run(OFFLINE, 1e3 / single.latency_ms["50"])
    if (why := too_slow(single, load)) is not None:
        return Bounded(single, offline, (), None, why)

    def good(outcome: Outcome) -> bool:
        return is_good(outcome, load)

    first, least = near or BEGIN * offline.completed, LEAST * offline.completed
    found = bisected(lambda rate: run(SERVER, rate), first, good, tolerance, near is not None, least)
    best = max(filter(good, found), key=lambda outcome: outcome.rate or 0.0, default=None)
    return Bounded(single, offline, tuple(found), best, none_valid(found, load) if best is None else None)


def too_slow(single: Outcome, load: Load) -> str | None:
    """Why no rate can be valid, from requests that came one at a time; None: one can."""
    alone = single.latency_ms[load.percentile]
    if alone <= load.bound_ms:
        return None
    return (
        f"bound_ms={load.bound_ms:g}: a request that comes alone takes {alone:.3g} ms at "
        f"p{load.percentile} already; raise it, or lower the requests' sizes"
    )


def none_valid(tried: Sequence[Outcome], load: Load) -> str:
    """That none of these runs was good."""
    return (
        f"no rate down to {tried[-1].rate:.3g} requests/s is valid by LoadGen within {load.bound_ms:g} ms at "
        f"p{load.percentile}: raise bound_ms, or seconds if the machine is busy"
    )


def valid_or_none(found: Bounded) -> float | None:
    """The largest valid rate."""
    return None if found.best is None else found.best.rate
