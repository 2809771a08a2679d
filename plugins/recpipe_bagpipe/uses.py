"""Loops over the rows of known batches, and over what the lookahead policy knows of each slot's row.

For the latter, ``due`` (int32 [slots]) is the next known batch that looks the row up, ``last`` the last batch
that did, and ``often`` how many batches did since the row came. Batches are counted over all streams.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recpipe.kit import compiled
from recpipe.plugin import RowIds, Slots

Counts = NDArray[np.int32]
Small = NDArray[np.int32] | NDArray[np.int64]
"""Row numbers, of 32 bits where all numbers fit."""
Used = tuple[RowIds, Counts]
UNKNOWN = np.iinfo(np.int32).max
"""The next use of a row that no known batch looks up again."""
KNOWN = 1 << 62
"""The worth of rows that a known batch needs, the next batch first, lies below this and above all others'."""
NEVER = KNOWN + 1
"""The worth of rows that may not be given away."""


@compiled
def in_group(
    looked_up: Small, order: RowIds, sizes: RowIds, first: int
) -> tuple[Counts, Small, Counts, Counts]:
    """``Group``'s ``next_use``, ``rows``, ``first_use`` and ``ends``.

    ``order`` (int64): the positions in ``looked_up``, by row and then by batch. ``sizes`` (int64): how many
    rows each batch has, of which the first has number ``first``.
    """
    steps = np.empty(len(order), np.int32)
    start = 0
    for batch in range(len(sizes)):
        for at in range(start, start + sizes[batch]):
            steps[at] = first + batch
        start += sizes[batch]
    next_use = np.full(len(order), UNKNOWN, np.int32)
    rows = np.empty(len(order), looked_up.dtype)
    first_use, ends = np.empty(len(order), np.int32), np.empty(len(order), np.int32)
    count = 0
    for at in order:
        if count and looked_up[at] == rows[count - 1]:
            next_use[ends[count - 1]] = steps[at]
            ends[count - 1] = at
        else:
            rows[count], first_use[count], ends[count] = looked_up[at], steps[at], at
            count += 1
    return next_use, rows[:count].copy(), first_use[:count].copy(), ends[:count].copy()


@compiled
def shared(before: Small, ends: Counts, rows: Small, uses: Counts) -> tuple[Used, Used]:
    """The ``ends`` of those sorted rows ``before`` that are among sorted ``rows``, and the ``uses`` of these;
    then the other ``rows`` and their ``uses``."""
    places, again = np.empty(len(rows), np.int64), np.empty(len(rows), np.int32)
    new, first_uses = np.empty(len(rows), np.int64), np.empty(len(rows), np.int32)
    at = known = 0
    for i in range(len(rows)):
        while at < len(before) and before[at] < rows[i]:
            at += 1
        if at < len(before) and before[at] == rows[i]:
            places[known], again[known] = ends[at], uses[i]
            known += 1
        else:
            new[i - known], first_uses[i - known] = rows[i], uses[i]
    others = len(rows) - known
    return (
        (places[:known].copy(), again[:known].copy()),
        (new[:others].copy(), first_uses[:others].copy()),
    )


@compiled
def announced(due: Counts, slots: Slots, rows: RowIds, uses: Counts, first: int, step: int) -> RowIds:
    """Note that distinct ``rows``, which are in ``slots`` (-1: in none), are needed at ``uses`` of the stream
    that began with batch ``first``; returns those in no slot. Nothing else is known of batches before
    ``step``."""
    cold = np.empty(len(rows), np.int64)
    count = 0
    for i in range(len(rows)):
        slot = slots[i]
        if slot < 0:
            cold[count] = rows[i]
            count += 1
        elif due[slot] == UNKNOWN or due[slot] < step:
            due[slot] = first + uses[i]
    return cold[:count]


@compiled
def touch(
    due: Counts, often: Counts, last: Counts, slots: Slots, uses: Counts, first: int, step: int
) -> None:
    """Note that batch ``step`` looks up the rows in distinct ``slots``, and that they are needed again at
    ``uses`` of the stream that began with batch ``first``."""
    for i in range(len(slots)):
        slot = slots[i]
        due[slot] = UNKNOWN if uses[i] == UNKNOWN else first + uses[i]
        often[slot] += 1
        last[slot] = step


@compiled
def apart(rows: RowIds, uses: Counts, misses: RowIds) -> tuple[Counts, Counts]:
    """The ``uses`` of those ``rows`` that are not ``misses``, and of these; both are sorted, and each of
    ``misses`` is there."""
    of_hits = np.empty(len(rows) - len(misses), np.int32)
    of_misses = np.empty(len(misses), np.int32)
    hits = missed = 0
    for i in range(len(rows)):
        if missed < len(misses) and misses[missed] == rows[i]:
            of_misses[missed] = uses[i]
            missed += 1
        else:
            of_hits[hits] = uses[i]
            hits += 1
    return of_hits, of_misses


@compiled
def worth(due: Counts, often: Counts, last: Counts, step: int) -> RowIds:
    """What slots of which this is known are worth in batch ``step``, int64: those with less are given away
    first."""
    worths = np.empty(len(due), np.int64)
    for i in range(len(due)):
        if last[i] == step:
            worths[i] = NEVER
        elif due[i] != UNKNOWN and due[i] > step:
            worths[i] = KNOWN - due[i]
        else:
            worths[i] = (np.int64(often[i]) << 32) + last[i]
    return worths
