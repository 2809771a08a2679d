"""The single trainer's oracle: groups, next uses, and how many batches a group has."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from recpipe_bagpipe.policy import Lookahead, NoBulk
from recpipe_bagpipe.reading import size_of, waiting
from recpipe_bagpipe.uses import first_of, least
from recpipe_bagpipe.window import (
    FEW,
    HOLD,
    PATIENCE,
    SETTLING,
    UNKNOWN,
    WEIGHED,
    Group,
    Pace,
    Window,
    _union,
    group_of,
)

from recpipe.data.config import SyntheticConfig
from recpipe.data.make import open_dataset
from recpipe.plugin.batch import Batch
from recpipe.plugin.policy import NOTHING, RowSpace
from recpipe.tables.tiers.planner import TierPlanner
from tests.tables.test_placement import BASES, given
from tests.tables.test_placement import batches as random_batches


def test_next_uses_are_those_of_the_stream() -> None:
    random = np.random.default_rng(0)
    batches = [np.unique(random.integers(0, 40, 12)) for _ in range(9)]
    groups: list[Group] = []
    for part in (batches[:2], batches[2:5], batches[5:]):
        groups.append(group_of(part, groups[-1] if groups else None))
    for before, later in pairwise(groups):
        before.link(later)
    ends = {0: 5, 2: 9, 5: 9}  # of the group after that which begins there
    for number, rows in enumerate(batches):
        group = next(g for g in groups if g.first <= number < g.end)
        found, next_use = group.of(number)
        assert np.array_equal(found, rows)
        for row, told in zip(rows, next_use, strict=True):
            uses = (later for later in range(number + 1, ends[group.first]) if row in batches[later])
            assert told == next(uses, UNKNOWN)


class Bare(Window):
    """A window whose batches are numbers."""

    def _waits(self, batch: Any, small: bool = True) -> Any:
        return SimpleNamespace(nbytes=1, batch=lambda: batch)


def read(slots: int, size: int, count: int = 20) -> list[int]:
    """The sizes of the groups of ``count`` batches, of which batch i looks up rows 10 i to 10 i + 9."""
    source: Any = iter(range(count))
    window = Bare(source, lambda number: np.arange(10) + 10 * int(number), lambda _: size, slots)  # type: ignore[call-overload]
    trained: list[Any] = []
    training = threading.Thread(target=lambda: trained.extend(window.batches()))
    training.start()
    groups = list(iter(window.next, None))
    training.join()
    assert trained == list(range(count))
    assert [group.first for group in groups] == [0, *(group.end for group in groups[:-1])]
    return [len(group.sizes) for group in groups]


def test_the_first_groups_are_small_and_later_ones_as_large_as_asked() -> None:
    assert read(slots=10_000, size=6) == [1, 2, 4, 6, 6, 1]


def test_two_groups_fit_the_slots() -> None:
    assert read(slots=60, size=6)[:4] == [1, 2, 3, 3]


def test_a_waiting_batch_comes_back_as_it_was() -> None:
    for pooling in (1, 3):
        data = open_dataset(SyntheticConfig(samples=400, table_scale=0.01, pooling=pooling), seed=1)
        batch = next(iter(data.batches("train", 64)))
        batch.weights = torch.rand(64)
        small = waiting(batch)
        assert small.nbytes < size_of(batch)
        again = small.batch()
        assert isinstance(again, Batch)
        for mine, its in (
            (batch.dense, again.dense),
            (batch.labels, again.labels),
            (batch.weights, again.weights),
        ):
            assert torch.equal(mine, its)
        assert again.sparse.keys() == batch.sparse.keys()
        for name in ("values", "lengths", "offsets"):
            mine, its = getattr(batch.sparse, name)(), getattr(again.sparse, name)()
            assert mine.dtype == its.dtype
            assert torch.equal(mine, its)


class Clock:
    """Time and waits of a run, as the test says."""

    def __init__(self) -> None:
        self.now = self.waited = 0.0

    def train(self, pace: Pace, share: float) -> int:
        """Train a group, of which training waits this share; returns the size of the next one."""
        self.now, self.waited = self.now + 1, self.waited + share
        pace.note(8, single=False)
        return pace.batches(100)


def test_groups_shrink_where_nothing_is_waited_for_and_grow_with_waits() -> None:
    clock = Clock()
    pace = Pace(None, 30_000, 1, lambda: clock.waited, lambda: clock.now)
    whole = pace.batches(100)
    assert whole == 99  # of a third of the memory
    sizes = [clock.train(pace, 0.0) for _ in range(8 * PATIENCE)]
    assert sizes[PATIENCE - 2] == whole
    assert sizes[-1] == FEW
    assert pace.shrunk
    assert [clock.train(pace, 0.5) for _ in range(8)][-1] == whole
    assert not pace.shrunk


@pytest.mark.parametrize("without", [0.8, 1.2], ids=["shorter", "longer"])
def test_batches_are_tried_without_looking_ahead(without: float) -> None:
    clock = Clock()
    pace = Pace(None, 30_000, 1, lambda: clock.waited, lambda: clock.now)
    ahead = []
    """For each group of 4 batches, whether it was read ahead."""
    off = []
    """And whether a trial had ended looking ahead by then."""
    for number in range(3 * HOLD // 4):
        ahead.append(not pace.single)
        off.append(pace.off)
        pause = 50.0 if number % 5 == 0 and not pace.single else 0.0  # an evaluation
        clock.now += 4 * (without if pace.single else 1.0) + pause
        pace.note(4, pace.single)
    assert ahead[:4] == [True] * 4
    tried = ahead.index(False)
    decided = tried + (SETTLING + WEIGHED) // 4
    assert set(ahead[tried:decided]) == {False}
    assert not any(off[:decided]), "a trial decides nothing before its end"
    assert off[decided] == (without < 1)
    assert set(ahead[decided : decided + HOLD // 4]) == {without > 1}
    assert (pace.with_it, pace.without) == (pytest.approx(1.0), pytest.approx(without))
    assert len(set(ahead[decided + HOLD // 4 :])) == 2, "it is tried again"


def test_a_hopeless_trial_ends_at_once() -> None:
    clock = Clock()
    pace = Pace(None, 30_000, 1, lambda: clock.waited, lambda: clock.now)
    singles = 0
    for _ in range(HOLD // 4):
        singles += pace.single
        clock.now += 4 * (2.0 if pace.single else 1.0)
        pace.note(4, pace.single)
    assert singles == 1


def test_looking_ahead_is_not_doubted_where_the_store_is_the_limit() -> None:
    clock = Clock()
    pace = Pace(None, 30_000, 1, lambda: clock.waited, lambda: clock.now)
    for _ in range(100):
        clock.train(pace, 0.2)
        assert not pace.single


def test_a_fixed_window_stays_and_memory_bounds_the_other() -> None:
    clock = Clock()
    fixed = Pace(7, 10, 1, lambda: clock.waited, lambda: clock.now)
    assert {clock.train(fixed, share) for share in (0.0, 0.0, 0.5)} == {7}
    bound = Pace(None, 3_000, 10, lambda: clock.waited, lambda: clock.now)
    bound.announced(rows=100, batches=2)
    assert bound.batches(100) == 3_000 // (300 + 1000 + 1)
    assert bound.batches(10_000) == 1


@pytest.mark.parametrize("largest", [3, 1 << 20, 1 << 31, 1 << 61])
def test_the_union_of_sorted_rows(largest: int) -> None:
    rng = np.random.default_rng(largest)
    parts = [np.unique(rng.integers(0, largest, size)) for size in (0, 1, 1000, 0, 300)]
    np.testing.assert_array_equal(_union(parts), np.unique(np.concatenate(parts)))


STEP = 50


@pytest.mark.parametrize("size", [1, 40, 900, 4000])
@pytest.mark.parametrize("kinds", [1, 5, 3000])
@pytest.mark.parametrize("needed", [0.0, 0.2, 1.0])
def test_the_least_are_found_among_what_may_be_given_away(size: int, kinds: int, needed: float) -> None:
    """Rows that no known batch needs first, those that were looked up in fewer batches, then longer ago."""
    random = np.random.default_rng(size)
    often, last = (random.integers(low, low + kinds, 3000).astype(np.int32) for low in (0, STEP - kinds))
    due = np.where(random.random(3000) < needed, STEP + random.integers(-2, 9, 3000), UNKNOWN)
    last[::7] = STEP  # looked up now
    taken = np.flatnonzero(last[:2900] < STEP)[::9].astype(np.int32)
    found, worths = least(told_of(due, often, last), 2900, STEP, taken, size)
    known = (due > STEP) & (due != UNKNOWN)
    order = np.lexsort((np.where(known, -due, last), np.where(known, 0, often), known))
    free = (last < STEP) & (np.arange(3000) < 2900) & ~np.isin(np.arange(3000), taken)
    np.testing.assert_array_equal(found, order[free[order]][:size])
    assert (np.diff(worths) >= 0).all()


def told_of(due: Any, often: Any, last: Any) -> Any:
    return np.stack((due, often, last), axis=1).astype(np.int32).reshape(-1)


def test_listed_slots_are_given_while_they_are_worth_as_little() -> None:
    due, often, last = np.full(6, UNKNOWN), np.ones(6), np.arange(6)
    listed, worths = least(told_of(due, often, last), 6, STEP, NOTHING.slots, 6)
    last[1], due[2] = STEP, STEP + 3
    now = told_of(due, often, last)
    found, seen = first_of(listed, worths, now, STEP, 2)
    assert (found.tolist(), seen) == ([0, 3], 4)
    found, seen = first_of(listed, worths, now, STEP, 9)
    assert (found.tolist(), seen) == ([0, 3, 4, 5], 6)


def told(form: str, other: bool) -> dict[str, Any]:
    """What the policy keeps of each row in 20 batches, of which it is told in this form; ``other``: a plugin
    has brought a row that the reader did not see into every batch."""
    space = RowSpace(BASES, int(BASES[-1]))
    pace = Pace(3, memory=0, record_bytes=0, waited=lambda: 0.0)
    policy = Lookahead(space, lambda bags: np.unique(bags.indices), NoBulk(), pace)
    planner = TierPlanner(policy, carry=True)
    made = random_batches(20)
    source: Any = iter(made)
    for coming, bags in zip(policy.stream(source), made, strict=True):
        assert len(coming.indices) == len(bags)
        mine = replace(bags, rows=np.where(bags.rows == 3, 39, bags.rows)) if other else bags
        planner.plan(given(mine, form))
        planner.commit()
    slots = space.residents.slot_of(np.arange(space.rows))
    kept = {name: getattr(policy, name)[slots] for name in ("due", "often", "last")}
    return {"here": slots >= 0, **{name: np.where(slots >= 0, of, 0) for name, of in kept.items()}}


@pytest.mark.parametrize("other", [False, True])
def test_a_batch_counts_alike_whether_rows_are_told_once_or_at_every_lookup(other: bool) -> None:
    each, once = told("each", other), told("distinct", other)
    assert each["often"].max() > 3
    for name, values in each.items():
        np.testing.assert_array_equal(values, once[name])
