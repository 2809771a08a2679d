"""Loops over the rows of known batches, and over what the lookahead policy knows of each slot's row.

The latter is ``known``, int32 [WIDTH * slots]. Of slot s it has, from WIDTH * s on: at DUE the next known
batch that looks the row up, at LAST the last one that did, and at OFTEN how many did since the row came. It
is one array, since slots come in any order, and a processor fetches what lies together at once. Batches are
counted over all streams.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from recpipe.kit import compiled
from recpipe.plugin import RowIds, Slots

Counts = NDArray[np.int32]
Small = NDArray[np.int32] | NDArray[np.int64]
"""Row numbers, of 32 bits where all numbers fit."""
Used = tuple[RowIds, Counts]
DUE, OFTEN, LAST = range(3)
WIDTH = 3
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
def announced(known: Counts, slots: Slots, rows: RowIds, uses: Counts, first: int, step: int) -> RowIds:
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
            continue
        due = WIDTH * slot + DUE
        if known[due] == UNKNOWN or known[due] < step:
            known[due] = first + uses[i]
    return cold[:count]


def looked_up_again(known: Counts, at: Any, use: Any, first: int, step: int) -> None:
    """Note at ``at``, where a slot's numbers begin, that batch ``step`` looks its row up, and that it is
    needed again at ``use`` of the stream that began with batch ``first``."""
    known[at + DUE] = UNKNOWN if use == UNKNOWN else first + use
    known[at + OFTEN] += 1
    known[at + LAST] = step


def awaited(due: Any, step: int) -> Any:
    """Whether a known batch after ``step`` looks up a row whose next use is ``due``."""
    return due != UNKNOWN and due > step


@compiled
def touch(known: Counts, slots: Slots, uses: Counts, first: int, step: int, came: bool) -> None:
    """Note that batch ``step`` looks up the rows in distinct ``slots``, and that they are needed again at
    ``uses`` of the stream that began with batch ``first``. ``came``: they have just come into their slots."""
    for i in range(len(slots)):
        at = WIDTH * slots[i]
        if came:
            known[at + OFTEN] = 0
        looked_up_again(known, at, uses[i], first, step)


@compiled
def touch_known(
    known: Counts,
    announced: Small,
    uses: Counts,
    looked_up: RowIds,
    misses: RowIds,
    hits: Slots,
    first: int,
    step: int,
) -> tuple[bool, Counts]:
    """As ``touch`` for the rows in the slots ``hits``, if the batch was ``announced`` with the rows that it
    looks up (``looked_up``): sorted ones, which are needed again at ``uses``; of these all but ``misses``,
    sorted too, are in ``hits``, in the same order. Returns whether it was, and the ``uses`` of ``misses``."""
    of_misses = np.empty(len(misses), np.int32)
    if len(announced) != len(looked_up):
        return False, of_misses
    for i in range(len(announced)):
        if announced[i] != looked_up[i]:
            return False, of_misses
    hit = missed = 0
    for i in range(len(announced)):
        if missed < len(misses) and misses[missed] == announced[i]:
            of_misses[missed] = uses[i]
            missed += 1
        else:
            looked_up_again(known, WIDTH * hits[hit], uses[i], first, step)
            hit += 1
    return True, of_misses


def worth(known: Counts, slot: Any, step: int) -> Any:
    """What ``slot`` is worth in batch ``step``, int64: those with less are given away first."""
    at = WIDTH * slot
    due, often, last = known[at + DUE], known[at + OFTEN], known[at + LAST]
    if last == step:
        return NEVER
    if awaited(due, step):
        return KNOWN - due
    return (np.int64(often) << 32) + last


@compiled
def first_of(slots: Slots, worths: RowIds, known: Counts, step: int, wanted: int) -> tuple[Slots, int]:
    """The first ``wanted`` of ``slots`` that are worth as little as ``worths`` says, and how many of them had
    to be looked at for that. The others were looked up, or have become known to be needed, since then."""
    found = np.empty(min(wanted, len(slots)), np.int32)
    count = seen = 0
    while count < wanted and seen < len(slots):
        slot = slots[seen]
        if worth(known, slot, step) == worths[seen]:
            found[count] = slot
            count += 1
        seen += 1
    return found[:count], seen


SAMPLED = 64
"""Of so many values one is looked at to estimate which are among the least."""
DIGITS = 1 << 11
"""The base of the numbers that are put in order, one digit after the other."""


def by_worth(known: Counts, slots: Slots, step: int) -> Slots:
    """``slots``, none of which the batch looks up, those that are worth less first, equal ones as they come:
    a radix sort of their worth as a number of few bits."""
    least: Any = np.int64(1 << 40)
    most: Any = np.int64(0)
    oldest: Any = least
    latest: Any = -least
    furthest: Any = np.int64(0)
    for slot in slots:
        at = WIDTH * slot
        due, often, last = known[at + DUE], np.int64(known[at + OFTEN]), np.int64(known[at + LAST])
        if awaited(due, step):
            furthest = max(furthest, np.int64(due))
        else:
            least, most = min(least, often), max(most, often)
            oldest, latest = min(oldest, last), max(latest, last)
    span = max(latest - oldest + 1, 1)
    needed = max(most - least + 1, 0) * span  # the least key of a row that a known batch needs
    keys = np.empty(len(slots), np.int64)
    greatest = np.int64(0)
    for i in range(len(slots)):
        at = WIDTH * slots[i]
        due, often, last = known[at + DUE], np.int64(known[at + OFTEN]), np.int64(known[at + LAST])
        if awaited(due, step):
            keys[i] = needed + furthest - due
        else:
            keys[i] = (often - least) * span + last - oldest
        greatest = max(greatest, keys[i])
    ordered, ordered_keys = slots.copy(), np.empty(len(slots), np.int64)
    slots = slots.copy()
    while greatest > 0:
        ends = np.zeros(DIGITS + 1, np.int64)
        for key in keys:
            ends[key % DIGITS + 1] += 1
        for digit in range(DIGITS):
            ends[digit + 1] += ends[digit]
        for i in range(len(slots)):
            digit = keys[i] % DIGITS
            ordered[ends[digit]], ordered_keys[ends[digit]] = slots[i], keys[i] // DIGITS
            ends[digit] += 1
        slots, ordered = ordered, slots
        keys, ordered_keys = ordered_keys, keys
        greatest //= DIGITS
    return slots


@compiled
def least(known: Counts, used: int, step: int, taken: Slots, size: int) -> tuple[Slots, RowIds]:
    """Of the first ``used`` slots the ``size`` that are worth least, or all that may be given away, the least
    first and equal ones by their number; and what they are worth. None of ``taken``.

    A bound on them is estimated from a sample, so that few have to be put in order.
    """
    worths = np.empty(used, np.int64)
    for slot in range(used):
        worths[slot] = worth(known, slot, step)
    for slot in taken:
        worths[slot] = NEVER
    sample: RowIds = np.sort(worths[::SAMPLED])
    place = size * 5 // (4 * SAMPLED)
    bound = min(sample[place], NEVER - 1) if place < len(sample) else NEVER - 1
    slots = np.empty(used, np.int32)
    found = 0
    for slot in range(used):
        slots[found] = slot
        found += worths[slot] <= bound
    if found < size and bound < NEVER - 1:
        found = 0
        for slot in range(used):
            slots[found] = slot
            found += worths[slot] < NEVER
    ordered = by_worth(known, slots[:found], step)[:size]
    return ordered, worths[ordered]
