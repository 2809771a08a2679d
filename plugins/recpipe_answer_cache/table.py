"""The scores of candidates by the digests of their requests: a table of compiled loops, whose rows are in
sets of ``WAYS``, of which the one that was asked for longest ago gives way."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from recpipe.common.loops import compiled
from recpipe_answer_cache.digests import LANES

WAYS = 8
"""Rows of a set: a digest may be in any of them."""
MISS, EQUAL, DUE, READY = range(4)
"""What a candidate is: not there; there with the answer to an equal request; a hit that is to be inferred
again; one that may be answered."""
KEPT, EVICTED, EXPIRED, TICKS = range(4)
"""Places among a table's counts: rows that are used, rows that gave way, hits whose time had passed or whose
rows had changed, and requests so far."""
_SET, _NONE = np.uint64(32), np.uint64(0)


def _set_of(first: Any, rows: Any) -> Any:
    """The first row of the set of a digest, in a table of so many rows."""
    return np.int64(((first >> _SET) * np.uint64(rows // WAYS)) >> _SET) * WAYS


def _row(keys: Any, used: Any, first: Any, second: Any) -> Any:
    """The row of a digest; -1: it has none."""
    begin = _set_of(first, len(used))
    for row in range(begin, begin + WAYS):
        if used[row] > 0 and keys[2 * row] == first and keys[2 * row + 1] == second:
            return row
    return -1


def _room(keys: Any, used: Any, counts: Any, first: Any, second: Any) -> Any:
    """The row of a digest that has none, which may have been another's."""
    begin = _set_of(first, len(used))
    oldest: Any = begin
    for row in range(begin, begin + WAYS):
        if used[row] < used[oldest]:
            oldest = row
    if used[oldest] > 0:
        counts[EVICTED] += 1
    else:
        counts[KEPT] += 1
    keys[2 * oldest], keys[2 * oldest + 1] = first, second
    return oldest


@compiled
def find_rows(
    keys: NDArray[np.uint64],
    used: NDArray[np.int64],
    since: NDArray[np.float64],
    versions: NDArray[np.int64],
    hits: NDArray[np.int64],
    due: NDArray[np.float64],
    looked: NDArray[np.int64],
    counts: NDArray[np.int64],
    digests: NDArray[np.uint64],
    coarser: bool,
    latest: NDArray[np.int64],
    setting: NDArray[np.float64],
    states: NDArray[np.int64],
    rows: NDArray[np.int64],
) -> None:
    """Look up N candidates of one request, which are counted.

    Args:
        keys: of the table's R rows [2 * R].
        used: the request in which each row was asked for last [R]; 0: it is free.
        since: when each answer came [R], seconds.
        versions: of the package that gave it [R].
        hits: since it came, or since one was wrong [R].
        due: the power of beta from which on a hit is inferred again [R].
        looked: the hit that was inferred again last [R].
        counts: [4].
        digests: [N * 4].
        coarser: whether the second two words of each count.
        latest: the version in which a row of each candidate changed last [N].
        setting: [3]: the time before which answers are too old, beta, and 1 where hits are inferred again.
        states: [N], written.
        rows: [N], written: -1 where it is missing.
    """
    counts[TICKS] += 1
    oldest, beta, refreshes = setting[0], setting[1], setting[2] > 0
    for n in range(len(states)):
        states[n], rows[n] = MISS, -1
        row = _row(keys, used, digests[n * LANES], digests[n * LANES + 1])
        if row >= 0 and (since[row] < oldest or versions[row] < latest[n]):
            counts[EXPIRED] += 1
            row = -1
        if row >= 0 and coarser:
            used[row] = counts[TICKS]
            states[n], rows[n] = EQUAL, row
            continue
        if coarser:
            row = _row(keys, used, digests[n * LANES + 2], digests[n * LANES + 3])
            if row >= 0 and (since[row] < oldest or versions[row] < latest[n]):
                counts[EXPIRED] += 1
                row = -1
        if row < 0:
            continue
        used[row] = counts[TICKS]
        states[n], rows[n] = READY, row
        hits[row] += 1
        # As ``Entry.is_due`` does.
        if refreshes and hits[row] >= min(due[row], max(1.0, looked[row] * beta)):
            looked[row] = hits[row]
            while beta > 1 and due[row] <= hits[row]:
                due[row] *= beta
            states[n] = DUE


@compiled
def keep_rows(
    keys: NDArray[np.uint64],
    used: NDArray[np.int64],
    since: NDArray[np.float64],
    versions: NDArray[np.int64],
    hits: NDArray[np.int64],
    due: NDArray[np.float64],
    looked: NDArray[np.int64],
    counts: NDArray[np.int64],
    kept: NDArray[np.float32],
    digests: NDArray[np.uint64],
    coarser: bool,
    states: NDArray[np.int64],
    wrong: NDArray[np.bool_],
    scores: NDArray[np.float32],
    now: NDArray[np.float64],
    version: int,
) -> None:
    """Keep what the model gave for M candidates: by their exact digests, and by the coarser ones.

    Args:
        keys: to ``counts``: see ``find_rows``.
        kept: the scores of the table's rows [R * T].
        digests: [M * 4].
        coarser: see ``find_rows``.
        states: what they were [M].
        wrong: those of which the answer that was there was wrong [M].
        scores: [M * T].
        now: [1], seconds.
        version: of the package.
    """
    outputs = len(kept) // len(used)
    for n in range(len(states)):
        for pair in range(2 if coarser else 1):
            first, second = digests[n * LANES + 2 * pair], digests[n * LANES + 2 * pair + 1]
            row = _row(keys, used, first, second)
            if row < 0:
                row = _room(keys, used, counts, first, second)
                hits[row], due[row], looked[row] = 0, 1.0, 0
            elif wrong[n] or states[n] == MISS:
                hits[row], due[row], looked[row] = 0, 1.0, 0
            used[row], since[row], versions[row] = counts[TICKS], now[0], version
            for output in range(outputs):
                kept[row * outputs + output] = scores[n * outputs + output]
