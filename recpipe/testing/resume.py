"""Whether a run resumed from a checkpoint does the same as the run that never stopped."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from recpipe.testing.runs import Trained
from recpipe.testing.watch import Moves, Step

ELSEWHERE = "what later decisions depend on must be in state_dict()"


def resumed_faults(whole: Trained, rest: Trained, step: int, moves: bool = True) -> Iterator[str]:
    """The first bitwise differences between ``whole`` and ``rest``, which was resumed after ``step``.

    ``moves`` False: micro-batches and the rows that are moved may differ.
    """
    expected, found = whole.record.steps[step:], rest.record.steps
    if len(expected) != len(found):
        yield f"it trains {len(found)} steps, not {len(expected)}"
    for number, (own, theirs) in enumerate(zip(found, expected, strict=False), step + 1):
        difference = _difference(own, theirs, moves)
        if difference:
            yield f"step {number} {difference} than in the run that never stopped: {ELSEWHERE}"
            return
    for name, value in whole.parameters.items():
        if not np.array_equal(rest.parameters[name], value):
            yield f"{name} does not end with the bits of the run that never stopped"
            return


def _difference(own: Step, theirs: Step, moves: bool) -> str:
    if not np.array_equal(np.sort(own.content), np.sort(theirs.content)):
        return "trains other samples"
    if not np.array_equal(own.content, theirs.content):
        return "trains its samples in another order"
    if moves and own.bounds != theirs.bounds:
        return f"has other micro-batches ({own.bounds}, not {theirs.bounds})"
    if moves and not all(_same(a, b) for a, b in zip(own.moves, theirs.moves, strict=True)):
        return "moves other rows between the tiers"
    if own.loss != theirs.loss:
        return "has another loss"
    return ""


def _same(own: Moves | None, theirs: Moves | None) -> bool:
    if own is None or theirs is None:
        return own is theirs
    return all(np.array_equal(own[name], value) for name, value in theirs.items())
