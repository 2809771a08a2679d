"""Runs a trace through a model and a cache in front of it, request by request, and holds the answers against
those of the model alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter, process_time
from typing import Any

import numpy as np
from numpy.typing import NDArray
from recpipe_serve import Asked
from recpipe_serve.batching.forms import together
from recpipe_serve.batching.scorer import RequestScorer

from recpipe_answer_cache.cache import InFront
from recpipe_answer_cache.entries import Clairvoyant, Entries, Entry, Popular, entries_of
from recpipe_answer_cache.errors import ErrorOf
from recpipe_answer_cache.model import predict

Floats = NDArray[np.float32]
WARM = 32
"""Requests that the model scores before the first one counts."""


@dataclass
class Replayed:
    """What one pass over a trace gave."""

    answers: list[Floats]
    seconds: float
    processor_seconds: float
    latencies: NDArray[np.float64]
    """Seconds of each request."""
    inferred: float
    """Requests that the model scored, or their shares."""

    @property
    def rate(self) -> float:
        """Requests a second."""
        return len(self.answers) / self.seconds


def replay(
    score: RequestScorer,
    asked: Sequence[Asked],
    cache: InFront | None,
    at: Callable[[int], None] | None = None,
    known: Sequence[Floats] = (),
) -> Replayed:
    """Answer all requests one after the other. ``at`` is told the number of each before it is asked. Of the
    first ones what the model says is ``known``: they fill the cache, and nothing else is told of them."""
    for one in asked[:WARM]:
        score(*together([one]))
    answers: list[Floats] = []
    latencies = np.empty(len(asked) - len(known))
    inferred = 0.0
    for number, one in enumerate(asked[: len(known)]):
        if cache is not None:
            if at is not None:
                at(number)
            found, ticket = cache.find(one)
            if found is None and ticket is not None:
                part = cache.lacking(one, ticket)
                cache.keep(ticket, known[number] if part is None else known[number][ticket.places])
    processor, began = process_time(), perf_counter()
    last = began
    for number, one in enumerate(asked[len(known) :]):
        if at is not None:
            at(len(known) + number)
        found, ticket = (None, None) if cache is None else cache.find(one)
        if found is None:
            part = None if ticket is None or cache is None else cache.lacking(one, ticket)
            left = one if part is None else part
            inferred += left.samples / one.samples
            scores = found = score(*together([left])).numpy()
            if ticket is not None and cache is not None:
                found = cache.completed(ticket, scores)
                cache.keep(ticket, scores)
        answers.append(found)
        now = perf_counter()
        latencies[number], last = now - last, now
    return Replayed(answers, last - began, process_time() - processor, latencies, inferred)


@dataclass(frozen=True)
class TrueErrors:
    """The answers of a cache beside the model's: all requests count, those that the model answered with 0."""

    score: float
    """The mean distance of predictions, as a share of the mean prediction; of several outputs the largest."""
    top_k: float
    """The share of requests whose k best samples are others."""
    other_bits: int
    """Requests whose answers are not the model's bit by bit."""


def true_errors(
    answers: Sequence[Floats], model: Sequence[Floats], outputs: Sequence[Any], k: int
) -> TrueErrors:
    """Of ``answers`` beside those that the ``model`` gave to the same requests."""
    changed = ErrorOf(outputs, "top_k", k)
    scored = ErrorOf(outputs, "score", k)
    off, size = np.zeros(len(outputs)), np.zeros(len(outputs))
    for answer, right in zip(answers, model, strict=True):
        wanted = scored.predictions(right)
        off += np.abs(scored.predictions(answer) - wanted).mean(axis=0)
        size += np.abs(wanted).mean(axis=0)
    pairs = list(zip(answers, model, strict=True))
    return TrueErrors(
        float((off / np.maximum(size, 1e-300)).max()),
        sum(changed(answer, right) for answer, right in pairs) / len(pairs),
        sum(answer.tobytes() != right.tobytes() for answer, right in pairs),
    )


@dataclass(frozen=True)
class PolicyHits:
    """Of each policy the share of requests whose key is there, at one capacity."""

    capacity: int
    measured: dict[str, float] = field(default_factory=dict)
    predicted: dict[str, float] = field(default_factory=dict)
    """By the analytic model, from how often each key is asked for."""


def policy_hits(keys: Sequence[bytes], capacities: Sequence[int]) -> list[PolicyHits]:
    """What the policies find of a trace of keys, beside the ideal cache, the bound of all policies, and what
    the analytic model says, whose requests are independent and whose caches are full from the beginning."""
    counts = np.array(sorted(Counter(keys).values(), reverse=True), np.float64)
    popularity = counts / counts.sum()
    found = []
    for capacity in capacities:
        makes: dict[str, Entries] = {
            "lru": entries_of("lru", capacity),
            "lfu": entries_of("lfu", capacity),
            "ideal": Popular(capacity, keys),
            "bound": Clairvoyant(capacity, keys),
        }
        measured = {name: _hits(entries, keys) for name, entries in makes.items()}
        predicted = {
            policy: predict(popularity, capacity, 0.0, None, policy).hits for policy in ("lru", "ideal")
        }
        found.append(PolicyHits(capacity, measured, predicted))
    return found


def _hits(entries: Entries, keys: Sequence[bytes]) -> float:
    nothing = Entry(np.empty(0, np.float32), 0.0)
    hits = 0
    for key in keys:
        if entries.find(key) is None:
            entries.put(key, nothing)
        else:
            hits += 1
    return hits / len(keys)
