"""What a column tells of a label by itself, beyond chance: what decides the label is not known when a model
is asked, and a model that sees it learns nothing else."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recpipe.data.proposal.column import Column
from recpipe.data.text_values import Bools
from recpipe.errors import shown

LEAK = 0.995
"""An AUC from which on a column by itself decides a label."""
FEWEST = 20
"""Samples of each label without which an AUC says nothing."""
BY_CHANCE = 1e-9


def auc(scores: NDArray[np.float64], positive: Bools) -> float | None:
    """The probability that a positive sample has the higher score, ties counting half; None with fewer than
    ``FEWEST`` samples of either label."""
    count, many = int(positive.sum()), len(positive)
    if min(count, many - count) < FEWEST:
        return None
    _, rank, ties = np.unique(scores, return_inverse=True, return_counts=True)
    ends = np.cumsum(ties)
    middle = ends - (ties - 1) / 2
    above = middle[rank][positive].sum() - count * (count + 1) / 2
    return float(above / (count * (many - count)))


def alone(column: Column, positive: Bools, known: Bools) -> float | None:
    """The AUC of a column by itself; ``positive`` bool [n], of the samples that are ``known``, bool [n]. None
    where the sample cannot say.

    Numbers are compared as they are, in either direction. Of ids, and of numbers too, the rate of each value
    is taken from half of the samples and tried on the others, so that an id of one sample proves nothing.
    """
    found = [_by_rates(column, positive & known, known)]
    as_numbers = column.content in ("whole", "number") or (column.content == "time" and not column.is_text)
    if as_numbers and column.lists is None:
        there = ~np.isnan(column.numbers) & known
        rising = auc(column.numbers[there], positive[there])
        found.append(None if rising is None else max(rising, 1 - rising))
    return max((each for each in found if each is not None), default=None)


def _by_rates(column: Column, positive: Bools, known: Bools) -> float | None:
    """Of each sample's values, the mean rate among the samples of the other half."""
    size = len(positive)
    codes, rows = column.codes, np.arange(size)
    if column.lists is not None:
        rows = np.repeat(rows, np.diff(column.lists[1]))
    half = np.random.default_rng(0).random(size) < 0.5
    use = known[rows] & (codes >= 0)
    learned = half[rows] & use
    many = int(codes.max(initial=-1)) + 1
    seen = np.bincount(codes[learned], minlength=many)
    clicked = np.bincount(codes[learned], positive[rows[learned]], minlength=many)
    rates = (clicked + 2 * positive.sum() / max(1, known.sum())) / (seen + 2)
    tried = ~half[rows] & use
    tried[tried] = seen[codes[tried]] > 0
    count = np.bincount(rows[tried], minlength=size)
    total = np.bincount(rows[tried], rates[codes[tried]], minlength=size)
    scored = count > 0
    return auc(total[scored] / count[scored], positive[scored])


def leak(column: Column, name: str, label: NDArray[np.float64], found: float | None) -> str | None:
    """Why ``column`` gives the label ``name`` (float64 [n], NaN where missing) away; None if it does not.
    ``found``: its AUC alone."""
    known = ~np.isnan(label)
    values = np.unique(label[known])
    if len(values) < 2:
        return None
    high = label > (values[0] + values[-1]) / 2
    when = f"{name} is high" if len(values) > 2 else f"{name} is {values[-1]:g}"
    if same := _equal(column, name, label, known):
        return same
    there = auc((~column.missing[known]).astype(float), high[known])
    if there is not None and max(there, 1 - there) >= LEAK:
        which = "has a value" if there > 0.5 else "is missing"
        return f"{which} exactly where {when} (AUC {max(there, 1 - there):.3f}): known only afterwards"
    if found is not None and found >= LEAK:
        ids = column.content in ("whole", "text")
        why = "an id of it has one label only" if ids else "it decides the label"
        return f"tells {name} by itself (AUC {found:.4f}): {why}"
    return _certain(column, when, high, known)


def _equal(column: Column, name: str, label: NDArray[np.float64], known: Bools) -> str | None:
    if column.lists is not None or column.content not in ("bool", "whole", "number"):
        return None
    both = known & ~np.isnan(column.numbers)
    if both.sum() < FEWEST or len(np.unique(label[both])) < 2:
        return None
    ours, theirs = column.numbers[both], label[both]
    if (ours == theirs).all():
        return f"equals {name} in every row"
    two = len(np.unique(theirs)) == len(np.unique(ours)) == 2
    if two and abs(np.corrcoef(ours, theirs)[0, 1]) > 0.9999:
        return f"is {name} in other numbers"
    return None


def _certain(column: Column, when: str, high: Bools, known: Bools) -> str | None:
    """One of few values with which the label is always high, more often than chance would have it."""
    if column.lists is not None or column.counted.distinct > 100:
        return None
    base = float(high[known].mean())
    codes = column.codes
    use = known & (codes >= 0)
    seen = np.bincount(codes[use])
    clicked = np.bincount(codes[use], high[use], minlength=len(seen))
    for code in np.flatnonzero((seen >= FEWEST) & (clicked == seen)):
        if 0 < base < 0.9 and base ** seen[code] < BY_CHANCE and seen[code] >= 0.01 * high.sum():
            value = column.values[int(np.argmax(codes == code))].as_py()
            return (
                f"{when} in all {seen[code]:,} rows where it is {shown(value)}, and in {100 * base:.2g}% of "
                "all: known only afterwards"
            )
    return None
