"""The analytic model: hit rate and error of a cache with auto-refresh under independent requests.

Requests for key i come by a Poisson process of rate r_i (the popularity, as a share of all requests), and its
right answer changes to another one by a Poisson process of rate m_i, both for each request of the whole.
``lru`` is modelled by Che's approximation: a key stays for a characteristic time T after each of its
requests, where sum_i (1 - exp(-r_i T)) is the capacity. ``ideal`` keeps the most popular keys for good. Hits
are inferred again at hit counts 1, beta, beta^2, ... after an answer came or was found wrong.

The state of a key at its n-th hit in a row depends on the gaps between its requests alone, which are
independent: a request misses with probability q = exp(-r T), and over the gap before a hit the answer stays
right with probability s = E[exp(-m gap) | gap < T]. From one time that the answer is new for sure and the
count is 0 to the next is a cycle; errors and inferences a request are their means in a cycle, by the mean
requests of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
UNLIKELY = 1e-9
"""A cycle that gets so far with no more than this probability is cut."""
MOST_HITS = 10**6
"""Of a cycle, where nothing ever changes or leaves."""


@dataclass(frozen=True)
class Predicted:
    """Shares of all requests."""

    hits: float
    """The key is there."""
    inferred: float
    """The model scores the request: misses and refreshes."""
    errors: float
    """The answer given is not the right one any more."""

    @property
    def served(self) -> float:
        """Answered from the cache."""
        return 1 - self.inferred


def zipf(keys: int, exponent: float) -> Floats:
    """The popularity of so many keys: proportional to rank ** -exponent."""
    weights = np.arange(1, keys + 1, dtype=np.float64) ** -exponent
    found: Floats = weights / weights.sum()
    return found


def refreshes(beta: float) -> Iterator[int]:
    """The hit counts at which hits are inferred again: the first one from each power of ``beta`` on."""
    power, last = 1.0, 0
    while True:
        if beta <= 1:
            last += 1
        else:
            while ceil(power) <= last:
                power *= beta
            last = ceil(power)
        yield last


def characteristic_time(popularity: Floats, capacity: int) -> float:
    """In requests of the whole, by which a key leaves an LRU cache that is not asked for; inf if all have
    room."""
    if capacity >= np.count_nonzero(popularity):
        return float("inf")
    low, high = 0.0, 1.0
    while -np.expm1(-popularity * high).sum() < capacity:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        full = -np.expm1(-popularity * middle).sum() >= capacity
        low, high = (low, middle) if full else (middle, high)
    return high


def predict(
    popularity: Floats, capacity: int, changes: Floats | float, beta: float | None, policy: str = "lru"
) -> Predicted:
    """What a cache of ``capacity`` answers does. ``popularity`` [K] sums up to 1; ``changes``: how often a
    key's answer changes, for each request of the whole; ``beta``: of the refreshes, None: there are none;
    ``policy``: lru or ideal."""
    changes = np.broadcast_to(np.asarray(changes, np.float64), popularity.shape)
    if policy == "ideal":
        kept = np.argsort(-popularity, kind="stable")[:capacity]
        misses = np.ones_like(popularity)
        misses[kept] = 0.0
        time = float("inf")
    else:
        time = characteristic_time(popularity, capacity)
        misses = np.exp(-popularity * time) if np.isfinite(time) else np.zeros_like(popularity)
    right = _stays_right(popularity, changes, time)
    again, wrong = _of_keys(misses, right, beta)
    hits = float(popularity @ (1 - misses))
    return Predicted(hits, float(1 - hits + popularity @ again), float(popularity @ wrong))


def _stays_right(rates: Floats, changes: Floats, time: float) -> Floats:
    """s: the means of exp(-change * gap) over exponential gaps of these rates below ``time``."""
    both = np.maximum(rates + changes, 1e-300)
    found: Floats = rates / both
    if np.isfinite(time):
        found = found * np.expm1(-both * time) / np.minimum(np.expm1(-rates * time), -1e-300)
    return np.where(rates > 0, found, 1.0)


def _of_keys(misses: Floats, right: Floats, beta: float | None) -> tuple[Floats, Floats]:
    """Of the requests for each key the shares that are refreshes, and that are answered wrongly; ``right``:
    s."""
    there = 1 - misses
    if beta is None:
        # Only a miss ends a cycle, of 1 / q requests: without any the answer is wrong for good once it
        # changes.
        wrong = 1 - misses / np.maximum(1 - there * right, 1e-300)
        return np.zeros_like(there), np.where(right < 1, wrong, 0.0)
    if beta <= 1:
        return there, np.zeros_like(there)
    requests, again, wrong = (np.zeros_like(there) for _ in range(3))
    reached, count = np.ones_like(there), 0
    for refresh in refreshes(beta):
        # Of this part's requests the j-th takes place if the j - 1 before were hits.
        gap = refresh - count
        requests += reached * (1 + _sum(there, gap - 1))
        wrong += reached * (_sum(there, gap - 1) - _sum(there * right, gap - 1))
        again += reached * there**gap
        reached, count = reached * (there * right) ** gap, refresh
        if count > MOST_HITS or float(reached.max()) < UNLIKELY:
            break
    return again / requests, wrong / requests


def _sum(ratio: Floats, count: int) -> Floats:
    """ratio + ratio^2 + ... + ratio^count."""
    near = ratio > 1 - 1e-12
    safe = np.where(near, 0.5, ratio)
    return np.where(near, float(count), safe * (1 - safe**count) / (1 - safe))
