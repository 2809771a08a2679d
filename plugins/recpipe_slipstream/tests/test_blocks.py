"""The three blocks by themselves: snapshots, threshold, marks; each rule against a plain loop."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from recpipe_slipstream.classifier import (
    BAND,
    Changes,
    Marks,
    bisected_threshold,
    changes,
    classify,
    count_touches,
    input_scores,
    quantile_threshold,
    samples_of,
    stale_share,
)

from recpipe.plugin import Bags, Mark
from recpipe.plugin import moved as moved_between


def bags_of(inputs: list[list[list[int]]]) -> Bags:
    """``inputs[b][f]``: the ids of feature f of sample b; feature-major as in a KJT."""
    features = len(inputs[0])
    bags = [inputs[b][f] for f in range(features) for b in range(len(inputs))]
    offsets = np.cumsum([0, *(len(bag) for bag in bags)])
    return Bags(np.array([row for bag in bags for row in bag], np.int64), offsets, len(inputs))


def random_bags(rng: np.random.Generator, size: int, rows: int, longest: int) -> list[list[list[int]]]:
    return [
        [rng.integers(0, rows, rng.integers(0, longest + 1)).tolist() for _ in range(3)] for _ in range(size)
    ]


def snapshots(rng: np.random.Generator) -> tuple[Mark, Mark]:
    """Rows 0 .. 39 before, 10 .. 49 after, some of them unchanged."""
    before = rng.standard_normal((50, 4)).astype(np.float32)
    after = before + rng.standard_normal((50, 4)).astype(np.float32) * 0.01
    after[::5] = before[::5]
    return Mark(np.arange(40), before[:40]), Mark(np.arange(10, 50), after[10:])


def compared(before: Mark, after: Mark, touches: NDArray[np.int64], least: int) -> Changes:
    return changes(before.rows, moved_between(before, after), touches, least)


# -- snapshots -------------------------------------------------------------------------------


def test_a_row_is_stale_when_every_dimension_moved_less_and_it_was_touched() -> None:
    rng = np.random.default_rng(0)
    before, after = snapshots(rng)
    touches = rng.integers(0, 3, 40)
    for least in (0, 1, 2):
        moved = compared(before, after, touches, least)
        assert moved.rows.tolist() == list(range(10, 40)), "hot means resident at both snapshots"
        for row, stale in zip(moved.rows.tolist(), moved.stale(0.01).tolist(), strict=True):
            distance = np.abs(after.weights[row - 10] - before.weights[row])
            assert stale == (bool((distance < np.float32(0.01)).all()) and touches[row] >= least)


def test_a_row_that_nobody_touched_is_stale_only_with_no_least_number() -> None:
    """min_touches=0 is the authors' code: a row that never trained counts as stale."""
    before = Mark(np.array([3, 8]), np.ones((2, 4), np.float32))
    touches = np.array([0, 1])
    assert compared(before, before, touches, 0).stale(1e-6).tolist() == [True, True]
    assert compared(before, before, touches, 1).stale(1e-6).tolist() == [False, True]


def test_nothing_is_below_a_threshold_of_zero() -> None:
    before = Mark(np.array([3]), np.ones((1, 4), np.float32))
    assert not compared(before, before, np.array([5]), 0).stale(0.0).any()


def test_comparing_is_pure() -> None:
    before, after = snapshots(np.random.default_rng(0))
    touches = np.ones(40, np.int64)
    copies = [a.copy() for a in (before.rows, before.weights, after.rows, after.weights, touches)]
    first, second = (compared(before, after, touches, 1) for _ in range(2))
    np.testing.assert_array_equal(first.delta, second.delta)
    for array, copy in zip(
        (before.rows, before.weights, after.rows, after.weights, touches), copies, strict=True
    ):
        np.testing.assert_array_equal(array, copy)
    assert not np.shares_memory(first.delta, before.weights)


def test_snapshots_without_a_row_in_common_mark_nothing() -> None:
    one, two = (Mark(np.array([row]), np.ones((1, 4), np.float32)) for row in (1, 2))
    moved = compared(one, two, np.ones(1, np.int64), 1)
    assert not len(moved.rows)
    assert np.isnan(moved.of(np.array([1, 2]))).all()


def test_touches_count_every_lookup_of_hot_rows() -> None:
    touches = np.zeros(3, np.int64)
    for looked_up in ([7, 2, 7, 5], [9, 7], []):
        count_touches(touches, np.array([2, 4, 7]), np.array(looked_up, np.int64))
    assert touches.tolist() == [1, 0, 3]
    count_touches(np.zeros(0, np.int64), np.zeros(0, np.int64), np.array([1]))


# -- inputs ----------------------------------------------------------------------------------


def hot_rows(rng: np.random.Generator) -> Changes:
    """30 of 40 rows are hot; a fifth of them may never be stale."""
    rows = np.sort(rng.choice(40, 30, replace=False))
    delta = rng.random(30).astype(np.float32)
    delta[rng.random(30) < 0.2] = np.inf
    return Changes(rows, delta)


@pytest.mark.parametrize("needed", [None, 1, 2, 4])
@pytest.mark.parametrize("longest", [1, 3])
def test_inputs_are_classified_and_scored_as_a_plain_loop_does(needed: int | None, longest: int) -> None:
    rng = np.random.default_rng(longest)
    moved = hot_rows(rng)
    inputs = random_bags(rng, 300, 40, longest)
    bags = bags_of(inputs)
    threshold = 0.6
    marks = Marks(0, moved.rows, moved.stale(threshold), 40)
    hot, stale = classify(marks, bags, needed)
    scores = iter(input_scores(moved, bags, needed).tolist())
    delta = dict(zip(moved.rows.tolist(), moved.delta.tolist(), strict=True))
    for number, features in enumerate(inputs):
        rows = [row for ids in features for row in ids]
        assert hot[number] == (len(rows) > 0 and all(row in delta for row in rows))
        if not hot[number]:
            assert not stale[number]
            continue
        least = len(rows) if needed is None else needed
        assert stale[number] == (sum(delta[row] < np.float32(threshold) for row in rows) >= least)
        expected = sorted(delta[row] for row in rows)[least - 1] if least <= len(rows) else np.inf
        assert next(scores) == expected, "the score is the least threshold above which the input is stale"
    assert hot.any()
    assert next(scores, None) is None
    assert (needed == 4 and longest == 1) != stale.any(), "an input cannot have more stale rows than rows"


@pytest.mark.parametrize("needed", [None, 2])
def test_scores_and_classes_agree_at_every_threshold(needed: int | None) -> None:
    rng = np.random.default_rng(5)
    moved, bags = hot_rows(rng), bags_of(random_bags(rng, 300, 40, 2))
    scores = input_scores(moved, bags, needed)
    shares = []
    for threshold in np.linspace(0, 1.1, 23).tolist():
        hot, stale = classify(Marks(0, moved.rows, moved.stale(threshold), 40), bags, needed)
        assert (scores < np.float32(threshold)).tolist() == stale[hot].tolist()
        shares.append(stale_share(scores, threshold))
    assert shares == sorted(shares), "the share of stale inputs never falls as the threshold grows"
    assert shares[0] == 0.0


def test_samples_of_lookups() -> None:
    bags = bags_of([[[1, 2], [3]], [[], [4, 5]]])
    assert samples_of(bags).tolist() == [0, 0, 0, 1, 1]
    assert not len(samples_of(Bags(np.empty(0, np.int64), np.zeros(1, np.int64), 0)))


# -- threshold -------------------------------------------------------------------------------


def smooth(seed: int, size: int = 2000) -> NDArray[np.float32]:
    """Scores as of real rows: many small ones, a long tail."""
    return np.random.default_rng(seed).lognormal(-5, 1, size).astype(np.float32)


@pytest.mark.parametrize("drop", [0.1, 0.2, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("seed", range(3))
def test_both_searches_land_in_the_band(drop: float, seed: int) -> None:
    scores = smooth(seed)
    assert stale_share(scores, quantile_threshold(scores, drop)) == pytest.approx(drop, abs=1 / len(scores))
    bisected = bisected_threshold(scores, drop)
    assert bisected > 0
    assert drop - BAND <= stale_share(scores, bisected) <= drop + BAND


@pytest.mark.parametrize(
    "scores", [smooth(0) + np.float32(0.2), np.full(50, 0.01, np.float32)], ids=["out of range", "one value"]
)
def test_a_bisection_that_fails_drops_nothing(scores: NDArray[np.float32]) -> None:
    assert bisected_threshold(scores, 0.3) == 0.0
    assert stale_share(scores, 0.0) == 0.0


def test_the_quantile_does_not_fail_where_bisection_does() -> None:
    scores = smooth(0) + np.float32(0.2)
    assert stale_share(scores, quantile_threshold(scores, 0.3)) == pytest.approx(0.3, abs=0.001)


def test_ties_take_the_nearest_share() -> None:
    scores = np.array([1, 1, 1, 1, 2, 2, 3, np.inf, np.inf, np.inf], np.float32)
    shares = {drop: stale_share(scores, quantile_threshold(scores, drop)) for drop in (0.1, 0.3, 0.55, 0.9)}
    assert shares == {0.1: 0.0, 0.3: 0.4, 0.55: 0.6, 0.9: 0.7}, "infinite scores are never stale"


@pytest.mark.parametrize("scores", [np.empty(0, np.float32), np.full(5, np.inf, np.float32)])
def test_without_inputs_that_can_be_stale_nothing_is_dropped(scores: NDArray[np.float32]) -> None:
    assert quantile_threshold(scores, 0.3) == 0.0
    assert stale_share(scores, 0.0) == 0.0
