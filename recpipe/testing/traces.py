"""What a run with the plugin does to its process and a run without it does not."""

from __future__ import annotations

from collections.abc import Iterator

from recpipe.testing.process import NAMELESS
from recpipe.testing.runs import Trained

_MOMENTS = [
    f"{moment} with other random numbers of {whose}"
    for moment in ("begins", "ends")
    for whose in ("Python's", "numpy's", "torch's")
]


def traces(mine: Trained, plain: Trained, after: int = 0) -> Iterator[str]:
    """What ``mine`` changes while it trains, what it leaves, and where it disturbs random numbers; ``after``:
    the step from which it was resumed."""
    for what, step in mine.record.changed.items():
        if what not in plain.record.changed:
            yield f"it {what}, first seen in step {step}"
    # Ranks meet over sockets, how many depends on who has work to share; their process's end closes them.
    meets = mine.report["ranks"]["world"] > 1 or mine.report["assembly"]["sharded"]
    for what in mine.left:
        if what not in plain.left and not (meets and NAMELESS in what):
            yield f"a run with it {what}"
    steps = zip(mine.record.steps, plain.record.steps[after:], strict=False)
    for number, (own, theirs) in enumerate(steps, after + 1):
        # A resumed run gets the checkpoint's random numbers when its first step has begun.
        known = 3 if after and number == after + 1 else 0
        for moment, found, expected in zip(
            _MOMENTS[known:], own.random[known:], theirs.random[known:], strict=True
        ):
            if found != expected:
                yield f"step {number} {moment} than without it"
                return
