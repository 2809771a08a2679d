"""Learning: what is counted, when it is learned, which rows get slots."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from recpipe_hotline.policy import HIGHEST, Learning, PopularRows

from recpipe.kit import top_rows
from recpipe.plugin.policy import RowSpace

ROWS, SLOTS = 100, 12
LEARNING = Learning(learn_batches=3, growth=2.0, relearn_every=5, sample=0.5, decay=2)


def make(learning: Learning = LEARNING, slots: int = SLOTS) -> PopularRows:
    return PopularRows(RowSpace(np.array([0, 60, ROWS]), slots), learning)


def batches(count: int) -> Iterator[NDArray[np.int64]]:
    """Skewed ids; which ones are popular has nothing to do with their order."""
    rng = np.random.default_rng(1)
    names = rng.permutation(ROWS)
    for _ in range(count):
        yield names[(rng.random(50) ** 3 * ROWS).astype(np.int64)]


def resident(policy: PopularRows) -> list[int]:
    return sorted(policy.space.residents.row_of_slot[policy.space.residents.row_of_slot >= 0].tolist())


def see(policy: PopularRows, rows: NDArray[np.int64]) -> tuple[list[int], list[int]]:
    """One batch as the planner shows it; the placement as lists."""
    placed = policy.migrate(rows)
    policy.space.residents.put(placed.slots, placed.rows)
    slot_of_row = {
        row: slot for slot, row in enumerate(policy.space.residents.row_of_slot.tolist()) if row >= 0
    }
    hits = np.array([slot_of_row[row] for row in rows.tolist() if row in slot_of_row], np.int32)
    misses = np.array(sorted(set(rows.tolist()) - slot_of_row.keys()), np.int64)
    assert not len(policy.admit(hits, misses, rows).rows)
    return placed.slots.tolist(), placed.rows.tolist()


def assert_same(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert one.keys() == two.keys()
    for key in one:
        np.testing.assert_array_equal(one[key], two[key], err_msg=key)


@pytest.mark.parametrize("sample", [1.0, 0.5])
def test_told_each_row_once_it_decides_and_counts_the_same(sample: float) -> None:
    learning = Learning(3, 2.0, 5, sample, 2)
    repeated, once = make(learning), make(learning)
    for batch in batches(40):
        distinct, times = np.unique(batch, return_counts=True)
        once.times = times.astype(np.int32)
        assert see(once, distinct) == see(repeated, batch)
    assert_same(once.state_dict(), repeated.state_dict())
    assert repeated.learnings > 1
    assert 0 < repeated.hits < repeated.lookups == 40 * 50


def test_a_restored_policy_goes_on_the_same() -> None:
    rows = list(batches(30))
    whole, first, second = make(), make(), make()
    for batch in rows[:13]:
        see(whole, batch)
        see(first, batch)
    held = first.space.residents.row_of_slot
    used = np.flatnonzero(held >= 0).astype(np.int32)
    second.space.residents.put(used, held[used])
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


def test_a_sample_of_the_batches_counts() -> None:
    policy = make(Learning(4, 10.0, 100, 0.25, 1))
    total = 0
    for number, rows in enumerate(batches(12)):
        see(policy, rows)
        total += len(rows) if number % 4 == 0 else 0
        assert policy.counts.sum() == total, number


def test_it_learns_as_with_counts_and_marks_beside_the_map() -> None:
    policy = make(Learning(3, 2.0, 5, 1.0, 3))
    counts, marks, unpopular = np.zeros(ROWS, np.int32), np.zeros(ROWS, bool), []
    for rows in batches(40):
        held, learns = policy.space.residents.row_of_slot.copy(), policy.batch >= policy.next_learning
        if learns and (held >= 0).all():
            marks[:] = False
            marks[top_rows(counts, SLOTS, held)] = True
            unpopular = sorted(np.flatnonzero(~marks[held]), key=lambda slot: counts[held[slot]])
            counts //= 3
        np.add.at(counts, rows, 1)
        see(policy, rows)
        np.testing.assert_array_equal(policy.counts, counts)
        np.testing.assert_array_equal(policy.popular, marks)
        assert policy.unpopular.tolist() == unpopular
    assert policy.learnings > 3
    assert policy.replaced_rows > 0


def test_a_count_stays_at_the_highest() -> None:
    policy = make()
    policy.counts = np.full(ROWS, 2**31 - 1, np.int32)
    policy.popular = np.arange(ROWS) % 2 == 0
    see(policy, np.arange(ROWS))
    assert policy.counts.tolist() == [HIGHEST] * ROWS
    assert policy.popular.tolist() == [True, False] * (ROWS // 2)


def test_empty_slots_take_what_the_last_batch_missed() -> None:
    policy = make()
    first, second, third = batches(3)
    assert see(policy, first) == ([], [])
    missed = sorted(set(first.tolist()))
    slots, rows = see(policy, second)
    assert rows == missed[:SLOTS]
    assert slots == list(range(SLOTS))
    assert see(policy, third) == ([], []), "full, and nothing has been learned"


def test_popular_rows_are_those_most_looked_up() -> None:
    policy = make(Learning(5, 10.0, 100, 1.0, 1))
    seen = list(batches(6))
    for rows in seen:
        see(policy, rows)
    counts = np.bincount(np.concatenate(seen[:5]), minlength=ROWS)
    popular = np.flatnonzero(policy.popular)
    assert len(popular) == SLOTS
    assert counts[popular].min() >= counts[~policy.popular].max()


def test_popular_rows_replace_unpopular_ones_when_they_are_used() -> None:
    """Learned rows come in from the slab of a batch that used them, and push out unpopular rows alone."""
    policy = make(Learning(5, 10.0, 100, 1.0, 1))
    missed: set[int] = set()
    for rows in batches(30):
        before = resident(policy)
        _, placed = see(policy, rows)
        if policy.learnings:
            assert set(placed) <= missed
            assert policy.popular[placed].all()
            assert not policy.popular[list(set(before) - set(resident(policy)))].any()
        missed = set(rows.tolist()) - set(resident(policy))
    assert resident(policy) == np.flatnonzero(policy.popular).tolist()
    assert policy.replaced_rows > 0


def test_decay_forgets() -> None:
    """Yesterday's popular rows give way to today's, sooner the larger decay is."""

    def changed_after(decay: int) -> int:
        policy = make(Learning(5, 1.0, 1, 1.0, decay))
        old, new = np.repeat(np.arange(SLOTS), 4), np.repeat(np.arange(50, 50 + SLOTS), 4)
        for _ in range(20):
            see(policy, old)
        for number in range(40):
            see(policy, new)
            if resident(policy) == list(range(50, 50 + SLOTS)):
                return number
        return 40

    assert changed_after(4) < changed_after(1)


def test_rows_kept_are_distinct_per_batch() -> None:
    policy = make(slots=ROWS)
    for rows in (np.array([1, 2, 3]), np.array([1, 2]), np.array([1, 1, 2, 9, 2])):
        see(policy, rows)
    assert policy.hits == 2 + 4
    assert policy.rows_kept == 2 + 2


def test_no_slot_at_all() -> None:
    policy = make(slots=0)
    assert not any(see(policy, rows)[1] for rows in batches(10))


def test_room_for_all_rows() -> None:
    policy = make(slots=ROWS)
    seen = list(batches(10))
    for rows in seen:
        see(policy, rows)
    assert resident(policy) == sorted(set(np.concatenate(seen[:-1]).tolist()))
    assert policy.learnings == 0, "there was nothing to choose"
