"""The search against an exhaustive one over simulated servers."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import product
from math import log2
from typing import Any

import pytest
from recpipe_deeprecsys import command
from recpipe_deeprecsys.bounded import Bounded
from recpipe_deeprecsys.config import BenchOptions
from recpipe_deeprecsys.engine import Batching
from recpipe_deeprecsys.load import OFFLINE, SERVER, Load, Outcome
from recpipe_deeprecsys.search import Axes, axes_of, best_of, searched

START = Batching(256, 0.0, True, 4)
AXES = axes_of(START, 1024, 25.0, together=(False, True))
Rate = Callable[[Batching], float]


def convex(batch: int, wait: float, workers: int, merge: bool = True) -> Rate:
    """A rate with one maximum, near the values that are given; the costs of batch and wait depend on each
    other."""

    def rate(b: Batching) -> float:
        off = log2(b.batch / batch)
        late = (b.wait_ms - wait) / 5
        return (
            1000
            - 50 * off**2
            - 80 * late**2
            - 20 * off * late
            - 30 * (b.workers - workers) ** 2
            - 40 * (b.merge != merge)
        )

    return rate


def steps_apart(one: Batching, other: Batching, axes: Axes) -> int:
    return max(
        abs(values.index(getattr(one, axis)) - values.index(getattr(other, axis)))
        for axis, values in axes.items()
    )


def exhaustive(rate: Rate) -> Batching:
    every = (dict(zip(AXES, values, strict=True)) for values in product(*AXES.values()))
    return max((Batching(**values) for values in every), key=rate)  # type: ignore[arg-type]


def climbed(rate: Rate) -> tuple[Batching, int]:
    def measure(batching: Batching, floor: float) -> float | None:
        found = rate(batching)
        return found if found > floor else None

    tried = searched(START, AXES, measure)
    return best_of(tried).batching, len(tried)


@pytest.mark.parametrize("batch", [16, 100, 300, 1024])
@pytest.mark.parametrize("wait", [0.0, 2.0, 9.0])
@pytest.mark.parametrize("workers", [1, 3, 4])
@pytest.mark.parametrize("merge", [False, True])
def test_the_search_is_within_one_step_of_an_exhaustive_one(
    batch: int, wait: float, workers: int, merge: bool
) -> None:
    rate = convex(batch, wait, workers, merge)
    found, tried = climbed(rate)
    assert found.merge == merge
    assert steps_apart(found, exhaustive(rate), AXES) <= 1
    assert tried < len(AXES["batch"]) * len(AXES["wait_ms"]) * len(AXES["workers"]) / 3


def test_a_search_that_ends_at_its_start_would_be_seen() -> None:
    rate = convex(16, 6.0, 1)
    assert steps_apart(START, exhaustive(rate), AXES) > 1


def test_the_best_is_never_below_the_start() -> None:
    jagged: Rate = lambda b: 100 + (b.batch * 7 + b.workers * 13 + b.wait_ms * 3) % 11  # noqa: E731
    found, _ = climbed(jagged)
    assert jagged(found) >= jagged(START)


def test_the_axes_hold_the_start_and_the_largest_request() -> None:
    axes = axes_of(Batching(100, 3.0, True, 2), 700, 8.0)
    assert axes["batch"] == [16, 32, 64, 100, 128, 256, 512, 700, 1400, 2800]
    assert axes["wait_ms"] == [0.0, 0.25, 0.5, 1.0, 2.0, 3.0]
    assert list(axes["workers"]) == [1, 2]
    assert axes["merge"] == [True]
    alone = axes_of(Batching(100, 0.0, False, 1), 700, 8.0, 200)
    assert alone["wait_ms"] == [0.0]
    assert alone["batch"] == [100, 200, 400, 700]


class Setup:
    """Whose target is its batching."""

    def use(self, batching: Batching) -> Any:
        return batching


@pytest.mark.parametrize(
    ("most", "http", "asked", "begins"),
    [
        (256, False, [256], 256),
        (64, False, [256, 128, 64], 64),
        (8, False, [256, 128, 64, 32, 16], None),
        (64, True, [256], None),
        (256, True, [256], 256),
    ],
)
def test_the_search_begins_where_a_rate_is_valid(
    monkeypatch: pytest.MonkeyPatch, most: int, http: bool, asked: list[int], begins: int | None
) -> None:
    """Through HTTP nothing is cut, so that smaller parts would not help."""
    tried: list[int] = []
    offline, valid = Outcome(OFFLINE, True, None, 100.0), Outcome(SERVER, True, 70.0, 70.0)

    def measured(batching: Batching, *_: object) -> Bounded:
        tried.append(batching.batch)
        return Bounded(offline, offline, (), valid if batching.batch <= most else None, "too late")

    monkeypatch.setattr(command, "measured", measured)
    monkeypatch.setattr(command, "measuring", lambda *_: lambda batching, floor: None)
    load = Load(64, 25.0, "95", 0.1, 0, 1)
    before, found = command.climbed(Setup(), load, BenchOptions(workers=2, http=http), [1024])
    assert tried == asked
    cores = len(os.sched_getaffinity(0))
    assert {one.batching.threads for one in found} <= ({cores, max(1, cores // 2)} if http else {1})
    assert (found[0].batching.batch if found else None) == begins
    assert (before.best is None) == (begins is None)
