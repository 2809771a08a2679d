"""Learning: what is counted, when it is learned, what is undone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from recpipe_hotline.policy import Learning, PopularRows

from recpipe.embedding.policies import RowSpace

ROWS, SLOTS = 100, 12
LEARNING = Learning(learn_batches=3, growth=2.0, relearn_every=5, sample=0.5, decay=2)


def make(learning: Learning = LEARNING, migrate_rows: int = 5) -> PopularRows:
    return PopularRows(RowSpace(np.array([0, 60, ROWS]), SLOTS), learning, migrate_rows)


def batches(count: int) -> Iterator[NDArray[np.int64]]:
    rng = np.random.default_rng(1)
    for _ in range(count):
        yield (rng.random(50) ** 3 * ROWS).astype(np.int64)


def see(policy: PopularRows, rows: NDArray[np.int64]) -> tuple[list[int], list[int]]:
    """One batch as the planner shows it; the placement as lists."""
    placed = policy.migrate(rows)
    resident = set(policy.target.tolist())
    hits = np.array([0 for row in rows if row in resident], np.int32)
    misses = np.array(sorted(set(rows.tolist()) - resident), np.int64)
    assert not len(policy.admit(hits, misses, rows).rows)
    return placed.slots.tolist(), placed.rows.tolist()


def assert_same(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert one.keys() == two.keys()
    for key in one:
        np.testing.assert_array_equal(one[key], two[key], err_msg=key)


def test_undo_is_the_inverse_of_a_batch() -> None:
    """Through learnings, fading counts and moves under way: a batch undone and seen again changes nothing."""
    steady, wavering = make(), make()
    for number, rows in enumerate(batches(40)):
        see(wavering, rows[::-1] if number % 2 else (rows + 1) % ROWS)
        wavering.undo()
        assert see(wavering, rows) == see(steady, rows), number
        assert_same(wavering.state_dict(), steady.state_dict())
    assert steady.learnings > 3


def test_undo_restores_the_state() -> None:
    policy = make()
    for number, rows in enumerate(batches(40)):
        before = copy.deepcopy(policy.state_dict())
        see(policy, rows)
        policy.undo()
        after = policy.state_dict()
        if not before["fade"]:  # the division of counts is done once and stays done
            assert_same(before, after)
        see(policy, rows)
        assert policy.batch == number + 1


def test_a_restored_policy_goes_on_the_same() -> None:
    rows = list(batches(30))
    whole, first = make(), make()
    for batch in rows[:13]:
        see(whole, batch)
        see(first, batch)
    second = make()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for batch in rows[13:]:
        assert see(second, batch) == see(whole, batch)
    assert_same(second.state_dict(), whole.state_dict())


def test_when_it_learns() -> None:
    """After learn_batches, then when growth times as many are seen, at the latest after relearn_every."""
    policy, learned = make(Learning(3, 2.0, 8, 1.0, 1)), []
    for number, rows in enumerate(batches(32)):
        before = policy.learnings
        see(policy, rows)
        if policy.learnings > before:
            learned.append(number)
    assert learned == [3, 6, 12, 20, 28]


def test_all_batches_count_before_the_first_learning_then_a_sample() -> None:
    policy = make(Learning(4, 10.0, 100, 0.25, 1))
    total = 0
    for number, rows in enumerate(batches(12)):
        see(policy, rows)
        total += len(rows) if number < 4 or number % 4 == 0 else 0
        assert policy.counts.sum() == total, number


def test_popular_rows_are_those_most_looked_up() -> None:
    policy = make(Learning(5, 10.0, 100, 1.0, 1), migrate_rows=ROWS)
    seen = list(batches(6))
    for rows in seen:
        see(policy, rows)
    counts = np.bincount(np.concatenate(seen[:5]), minlength=ROWS)
    least = counts[policy.target].min()
    others = np.setdiff1d(np.arange(ROWS), policy.target)
    assert len(policy.target) == SLOTS
    assert counts[others].max() <= least
    assert policy.moved_rows == SLOTS


def test_decay_forgets() -> None:
    """Yesterday's popular rows give way to today's, sooner the larger decay is."""

    def changed_after(decay: int) -> int:
        policy = make(Learning(5, 1.0, 1, 1.0, decay), migrate_rows=ROWS)
        old, new = np.repeat(np.arange(SLOTS), 4), np.repeat(np.arange(50, 50 + SLOTS), 4)
        for _ in range(20):
            see(policy, old)
        for number in range(40):
            see(policy, new)
            if policy.target.tolist() == list(range(50, 50 + SLOTS)):
                return number
        return 40

    assert changed_after(4) < changed_after(1)


def test_moves_are_bounded_per_batch() -> None:
    policy = make(migrate_rows=2)
    moved = [len(see(policy, rows)[1]) for rows in batches(20)]
    assert max(moved) == 2
    assert sum(moved) == policy.moved_rows > SLOTS // 2


def test_no_slot_at_all() -> None:
    policy = PopularRows(RowSpace(np.array([0, ROWS]), 0), Learning(2, 2.0, 5, 1.0, 1), ROWS)
    assert not any(see(policy, rows)[1] for rows in batches(10))


def test_room_for_all_rows() -> None:
    policy = PopularRows(RowSpace(np.array([0, ROWS]), ROWS), Learning(2, 1.0, 1, 1.0, 1), ROWS)
    seen = list(batches(10))
    for rows in seen:
        see(policy, rows)
    assert policy.target.tolist() == sorted(set(np.concatenate(seen[:-1]).tolist()))
