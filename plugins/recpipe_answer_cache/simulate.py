"""Independent requests with Zipf keys and drifting answers, asked of the cache's own entries one by one: what
the analytic model is held against."""

from __future__ import annotations

import numpy as np

from recpipe_answer_cache.entries import Entries, Entry, Popular, entries_of
from recpipe_answer_cache.model import Floats, Predicted


def simulated(
    popularity: Floats,
    capacity: int,
    changes: float,
    beta: float | None,
    policy: str,
    requests: int,
    seed: int = 0,
) -> Predicted:
    """What the entries of a ``policy`` (``lru``, ``lfu``, ``ideal``) do over so many requests, after one for
    each key, the rarest first, and half as many that only fill them. ``changes``: of a key's answer, for each
    request."""
    rng = np.random.default_rng(seed)
    before = len(popularity) + requests // 2
    drawn = rng.choice(len(popularity), requests + requests // 2, p=popularity)
    asked = np.concatenate([np.argsort(popularity, kind="stable"), drawn])
    names = [number.to_bytes(4, "little") for number in range(len(popularity))]
    entries: Entries
    if policy == "ideal":
        entries = Popular(capacity, [names[n] for n in np.argsort(-popularity, kind="stable")[:capacity]])
    else:
        entries = entries_of(policy, capacity)
    # Right answers are numbers that count a key's changes, drawn for the gap since its request before.
    version = np.zeros(len(popularity), np.int64)
    seen = np.zeros(len(popularity), np.int64)
    hits = inferred = errors = 0
    for at, key in enumerate(asked.tolist()):
        counts = at >= before
        if changes:
            version[key] += rng.poisson(changes * (at - seen[key]))
            seen[key] = at
        right = version[key : key + 1].astype(np.float32)
        entry = entries.find(names[key])
        if entry is None:
            entries.put(names[key], Entry(right, at))
            inferred += counts
            continue
        hits += counts
        entry.hits += 1
        if beta is not None and entry.is_due(beta):
            inferred += counts
            entry.refreshed(Entry(right, at), bool(entry.scores[0] != right[0]))
        else:
            errors += counts and bool(entry.scores[0] != right[0])
    return Predicted(hits / requests, inferred / requests, errors / requests)
