"""Batches chosen at random, read in few pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TypeVar

import numpy as np

T = TypeVar("T")


def chosen_batches(batches: Callable[[int], Iterable[T]], total: int, count: int, seed: int) -> Iterator[T]:
    """``count`` of ``total`` batches, chosen at random without replacement, in the data's order. Adjacent
    ones are read together.

    ``batches(n)`` reads from batch n on. ``count`` is at most ``total``; 0: there are none.
    """
    chosen = np.sort(np.random.default_rng(seed).choice(total, count, replace=False))
    for run in np.split(chosen, np.flatnonzero(np.diff(chosen) > 1) + 1):
        if len(run):
            yield from islice(batches(int(run[0])), len(run))
