"""The scores of candidates by the digests of their requests: a table of compiled loops, whose rows are in
sets of ``WAYS``, of which the one that was asked for longest ago gives way.

A row has eight words of 8 bytes, a line of a processor's cache: loops get all of them as one array of int64,
and as one of float64, for those that are such numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from recpipe.common.loops import compiled
from recpipe_answer_cache.digests import LANES

WAYS = 8
"""Rows of a set: a digest may be in any of them."""
WORDS = 8
FIRST, SECOND, USED, SINCE, VERSION, HITS, DUE, LOOKED = range(WORDS)
"""Words of a row: its digest, the request in which it was asked for last (0: it is free), when its answer
came (seconds, float64), the version of the package that gave it, hits since then or since it was wrong, the
power of beta from which on a hit is inferred again (float64), and the hit that was inferred again last."""
MISS, EQUAL, RENEW, READY, WANTED = range(5)
"""What a candidate is: not there; there with the answer to an equal request; a hit that is to be inferred
again; one that may be answered. The last one: those that the model is to score."""
KEPT, EVICTED, EXPIRED, TICKS = range(4)
"""Places among a table's counts: rows that are used, rows that gave way, hits whose time had passed or whose
rows had changed, and requests so far."""
_HALF = np.uint64(32)


def _row(words: Any, first: Any, second: Any) -> Any:
    """The place of the first word of a digest's row; -1: it has none."""
    begin = _set_of(words, first)
    for at in range(begin, begin + WAYS * WORDS, WORDS):
        if words[at] == first and words[at + SECOND] == second and words[at + USED] > 0:
            return at
    return -1


def _set_of(words: Any, first: Any) -> Any:
    """The place of the first word of the set of a digest."""
    sets = np.uint64(len(words) // (WAYS * WORDS))
    return np.int64(((np.uint64(first) >> _HALF) * sets) >> _HALF) * (WAYS * WORDS)


def _room(words: Any, counts: Any, first: Any, second: Any) -> Any:
    """The place of a row for a digest that has none, which may have been another's."""
    begin = _set_of(words, first)
    oldest: Any = begin
    for at in range(begin, begin + WAYS * WORDS, WORDS):
        if words[at + USED] < words[oldest + USED]:
            oldest = at
    counts[EVICTED if words[oldest + USED] > 0 else KEPT] += 1
    words[oldest], words[oldest + SECOND] = first, second
    return oldest


def _found(words: Any, numbers: Any, counts: Any, first: Any, second: Any, oldest: Any, latest: Any) -> Any:
    """The place of a digest's row, unless its time has passed or its version is before the ``latest``."""
    at = _row(words, first, second)
    if at >= 0 and (numbers[at + SINCE] < oldest or words[at + VERSION] < latest):
        counts[EXPIRED] += 1
        at = -1
    return at


def _is_due(words: Any, numbers: Any, at: Any, beta: Any) -> Any:
    """As ``Entry.is_due``."""
    hits = words[at + HITS]
    if hits < min(numbers[at + DUE], max(1.0, words[at + LOOKED] * beta)):
        return False
    words[at + LOOKED] = hits
    while beta > 1 and numbers[at + DUE] <= hits:
        numbers[at + DUE] *= beta
    return True


@compiled
def find_rows(
    words: NDArray[np.int64],
    numbers: NDArray[np.float64],
    kept: NDArray[np.float32],
    counts: NDArray[np.int64],
    digests: NDArray[np.int64],
    coarser: bool,
    latest: NDArray[np.int64],
    setting: NDArray[np.float64],
    audit: bool,
    states: NDArray[np.int64],
    places: NDArray[np.int64],
    answer: NDArray[np.float32],
    told: NDArray[np.int64],
) -> None:
    """Look up N candidates of one request, which are counted.

    Args:
        words: of the table's R rows [R * WORDS].
        numbers: the same memory.
        kept: the scores of the rows [R * T].
        counts: [4].
        digests: [N * LANES].
        coarser: whether the second two words of each count.
        latest: the version in which a row of each candidate changed last [N].
        setting: [3]: the time before which answers are too old, beta, and 1 where hits are inferred again.
        audit: whether hits that may be answered are to be scored, too.
        states: [N], written.
        places: [N], written: which candidates the model is to score, first ones.
        answer: [N * T], written: what is kept; 0 of those that miss.
        told: [5], added to: how many are in each state, and how many the model is to score.
    """
    counts[TICKS] += 1
    oldest, beta, refreshes = setting[0], setting[1], setting[2] > 0
    outputs = len(answer) // len(states)
    for n in range(len(states)):
        state, lane = MISS, n * LANES
        at = _found(words, numbers, counts, digests[lane], digests[lane + 1], oldest, latest[n])
        if coarser and at >= 0:
            state = EQUAL
        elif coarser:
            at = _found(words, numbers, counts, digests[lane + 2], digests[lane + 3], oldest, latest[n])
        if at >= 0:
            words[at + USED] = counts[TICKS]
            if state == MISS:
                words[at + HITS] += 1
                state = RENEW if refreshes and _is_due(words, numbers, at, beta) else READY
        for output in range(outputs):
            answer[n * outputs + output] = kept[at // WORDS * outputs + output] if at >= 0 else np.float32(0)
        states[n] = state
        told[state] += 1
        if state in (MISS, RENEW) or (audit and state == READY):
            places[told[WANTED]] = n
            told[WANTED] += 1


@compiled
def keep_rows(
    words: NDArray[np.int64],
    numbers: NDArray[np.float64],
    kept: NDArray[np.float32],
    counts: NDArray[np.int64],
    digests: NDArray[np.int64],
    coarser: bool,
    states: NDArray[np.int64],
    wrong: NDArray[np.bool_],
    scores: NDArray[np.float32],
    now: NDArray[np.float64],
    version: int,
) -> None:
    """Keep what the model gave for M candidates: by their exact digests, and by the coarser ones.

    Args:
        words: to ``counts``: see ``find_rows``.
        digests: [M * LANES].
        coarser: see ``find_rows``.
        states: what they were [M].
        wrong: those of which the answer that was there was wrong [M].
        scores: [M * T].
        now: [1], seconds.
        version: of the package.
    """
    outputs = len(scores) // len(states)
    for n in range(len(states)):
        for lane in range(n * LANES, n * LANES + (LANES if coarser else 2), 2):
            at = _row(words, digests[lane], digests[lane + 1])
            is_new = at < 0
            if is_new:
                at = _room(words, counts, digests[lane], digests[lane + 1])
            if is_new or wrong[n] or states[n] == MISS:
                words[at + HITS], numbers[at + DUE], words[at + LOOKED] = 0, 1.0, 0
            words[at + USED], numbers[at + SINCE], words[at + VERSION] = counts[TICKS], now[0], version
            for output in range(outputs):
                kept[at // WORDS * outputs + output] = scores[n * outputs + output]
