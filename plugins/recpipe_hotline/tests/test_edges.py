"""Odd batches: each ends as without the plugin, whatever the split makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recpipe_hotline.plugin import PopularFirst
from recpipe_hotline.tests.rig import (
    QUICK,
    TOLERANCE,
    Fixed,
    Random,
    Rig,
    Setting,
    difference,
    make_batch,
    train,
)

from recpipe.plugin.batch import Batch

EARLY = QUICK | {"learn_batches": 2, "relearn_every": 4, "min_micro_batch": 1}
STEPS = 12


@dataclass(frozen=True)
class Case:
    """Batches, the budget, and what the splits must look like."""

    batches: Callable[[Random], list[Batch]]
    holds: Callable[[Rig], bool]
    resident: float = 0.3
    knobs: dict[str, Any] = field(default_factory=dict)


def plain(random: Random, sizes: list[int], **kinds: Any) -> list[Batch]:
    return [random.batch(size, **kinds) for size in sizes]


def split(rig: Rig) -> bool:
    return rig.split_batches > 0


def late_splits(rig: Rig) -> list[int]:
    """Micro-batches of each batch after the second learning, when the popular rows have settled."""
    return [len(bounds) for bounds in rig.micro[7:]]


def cold_tail(random: Random) -> list[Batch]:
    """Table a is popular, table b never sees an id twice: every sample needs a cold row."""
    batches = []
    for number in range(STEPS):
        popular = random.rng.integers(0, 5, 16)
        fresh = 5 + (16 * number + np.arange(16)) % 195
        batches.append(make_batch(random.rng, 16, np.concatenate((popular, fresh)), np.ones(32)))
    return batches


def repeated(random: Random) -> list[Batch]:
    """Each bag holds one id three times."""
    batches = []
    for _ in range(STEPS):
        ids = (random.rng.random(64) ** 4 * 200).astype(np.int64)
        batches.append(make_batch(random.rng, 32, np.repeat(ids, 3), np.full(64, 3)))
    return batches


def without_ids(random: Random) -> list[Batch]:
    """Every third batch looks up nothing at all."""
    return [random.batch(32, lengths=(0, 0) if n % 3 == 2 else (0, 2)) for n in range(STEPS)]


CASES = {
    "all popular": Case(
        lambda r: plain(r, [32] * STEPS, rows=5, skew=1.0),
        lambda rig: set(late_splits(rig)) == {1} and rig.policy.hits > 0.7 * rig.policy.lookups,
        resident=1.0,
    ),
    "none popular": Case(cold_tail, lambda rig: not split(rig), resident=0.02),
    "a budget of one row": Case(lambda r: plain(r, [32] * STEPS), lambda rig: True, resident=0.003),
    "batches of one": Case(lambda r: plain(r, [1] * 40), lambda rig: not split(rig)),
    "batches of two": Case(lambda r: plain(r, [2] * 40), split),
    "empty bags": Case(lambda r: plain(r, [32] * STEPS, lengths=(0, 1)), split),
    "batches without ids": Case(without_ids, split),
    "multi-hot": Case(lambda r: plain(r, [32] * STEPS, lengths=(0, 5)), split),
    "ids repeated in a bag": Case(repeated, split),
    "a short last batch": Case(lambda r: plain(r, [32] * STEPS + [5]), split),
    "uniform ids": Case(lambda r: plain(r, [32] * STEPS, skew=1.0), lambda rig: True),
    "small micro-batches forbidden": Case(
        lambda r: plain(r, [32] * STEPS),
        lambda rig: min(m for b in rig.micro for m in np.diff((0, *b))) >= 12 and split(rig),
        knobs={"min_micro_batch": 12},
    ),
    "all counts kept": Case(lambda r: plain(r, [32] * STEPS), split, knobs={"decay": 1, "growth": 1.0}),
    "a quarter counted": Case(lambda r: plain(r, [32] * STEPS), split, knobs={"sample": 0.25}),
}


# What a case does to batches is no matter of the optimizer.
@pytest.mark.parametrize("optimizer", [pytest.param("sgd", marks=pytest.mark.soak), "rowwise_adagrad"])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_run_without_it(name: str, optimizer: str, random: Random, tmp_path: Path) -> None:
    case = CASES[name]
    batches = case.batches(random)
    data, steps = Fixed(batches), len(batches)
    size = max(batch.size for batch in batches)
    setting = Setting(optimizer=optimizer, resident=case.resident, knobs=EARLY | case.knobs, batch_size=size)
    without = Setting(optimizer=optimizer, knobs=None, batch_size=size)
    rig, parameters = train(data, setting, tmp_path / "with", steps)
    assert len(rig.micro) == steps
    assert case.holds(rig), rig.micro
    assert (
        difference(parameters, train(data, without, tmp_path / "without", steps)[1]) <= TOLERANCE[optimizer]
    )


@pytest.mark.parametrize(
    ("needs_cold", "least", "order", "bounds"),
    [
        ([1, 0, 1, 0, 0], 1, [1, 3, 4, 0, 2], (3, 5)),
        ([1, 0, 1, 0, 0], 2, [1, 3, 4, 0, 2], (3, 5)),
        ([1, 0, 1, 0, 0], 3, [0, 1, 2, 3, 4], (5,)),
        ([0, 0, 0], 0, [0, 1, 2], (3,)),
        ([1, 1, 1], 0, [0, 1, 2], (3,)),
        ([1], 0, [0], (1,)),
        ([0], 0, [0], (1,)),
    ],
)
def test_split(
    needs_cold: list[int], least: int, order: list[int], bounds: tuple[int, ...], random: Random
) -> None:
    """Popular samples first, each part in its own order; whole where a part would be too small."""
    made = PopularFirst(least).split(random.batch(len(needs_cold)), np.array(needs_cold, bool))
    assert made.order.tolist() == order
    assert made.bounds == bounds
