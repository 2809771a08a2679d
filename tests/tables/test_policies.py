"""Cache policies against slow models in plain Python, over random streams of batches."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from recpipe.plugin.policy import CachePolicy, Placement, RowSpace
from recpipe.plugin.residents import MOST, NOTED, Residents
from recpipe.tables.tiers.policies import HotSet, Lfu, Lru, NoCache, add_lookups, distinct_slots
from tests.tables.samples import MAKERS

BASES = np.array([0, 40, 400])


class Cache:
    """Carries a policy's placements out on plain arrays, and checks the contract while doing so."""

    def __init__(self, policy: CachePolicy) -> None:
        self.policy = policy

    @property
    def row_of_slot(self) -> np.ndarray:
        return self.policy.space.residents.row_of_slot

    def slot_of(self) -> dict[int, int]:
        return {int(row): slot for slot, row in enumerate(self.row_of_slot) if row >= 0}

    def batch(self, rows: np.ndarray) -> tuple[Placement, Placement, np.ndarray, np.ndarray]:
        moved = self.policy.migrate(rows)
        self._place(moved)
        slots = self.slot_of()
        hits = np.array([slots[r] for r in rows.tolist() if r in slots], np.int32)
        misses = np.array(list(dict.fromkeys(r for r in rows.tolist() if r not in slots)), np.int64)
        placement = self.policy.admit(hits, misses, rows)
        assert len(set(placement.slots.tolist())) == len(placement.slots) == len(placement.rows)
        assert set(placement.rows.tolist()) <= set(misses.tolist())
        assert not set(placement.slots.tolist()) & set(hits.tolist()), "a row of this batch was evicted"
        self._place(placement)
        return moved, placement, hits, misses

    def _place(self, placement: Placement) -> None:
        self.policy.space.residents.put(placement.slots, placement.rows)
        resident = self.row_of_slot[self.row_of_slot >= 0]
        assert len(np.unique(resident)) == len(resident), "a row has two slots"


def streams(seed: int, batches: int = 60) -> Iterator[np.ndarray]:
    """Batches of very different sizes over drifting, skewed rows; some empty."""
    rng = np.random.default_rng(seed)
    for step in range(batches):
        size = int(rng.choice([0, 1, 7, 30, 90]))
        rows = (rng.random(size) ** 4 * BASES[-1] + step // 2).astype(np.int64) % BASES[-1]
        yield rows


def assert_same_state(left: Any, right: Any) -> None:
    assert left.keys() == right.keys()
    for key, value in left.items():
        np.testing.assert_array_equal(value, right[key], err_msg=key)


@pytest.mark.parametrize("slots", [1, 13, 64, 399])
@pytest.mark.parametrize("seed", range(4))
def test_lru_equals_an_ordered_list(slots: int, seed: int) -> None:
    cache = Cache(Lru(RowSpace(BASES, slots)))
    oldest_first: list[int] = []
    for rows in streams(seed):
        _, placement, hits, misses = cache.batch(rows)
        touched = sorted(set(hits.tolist()))
        fresh = list(range(len(oldest_first), min(slots, len(oldest_first) + len(misses))))
        free = [slot for slot in oldest_first if slot not in touched]
        chosen = fresh + free[: len(misses) - len(fresh)]
        assert placement.slots.tolist() == chosen
        assert placement.rows.tolist() == misses[: len(chosen)].tolist()
        touched += chosen
        oldest_first = [slot for slot in oldest_first if slot not in touched] + touched


@pytest.mark.parametrize("slots", [1, 13, 64])
@pytest.mark.parametrize("seed", range(4))
def test_lfu_replaces_only_rows_used_less_often(slots: int, seed: int) -> None:
    cache, counts = Cache(Lfu(RowSpace(BASES, slots))), Counter[int]()
    replaced = 0
    for rows in streams(seed):
        before = cache.row_of_slot.copy()
        empty = int((before < 0).sum())
        counts.update(rows.tolist())
        _, placement, _, misses = cache.batch(rows)
        assert len(placement.slots) >= min(empty, len(misses)), "empty slots are filled"
        for slot, row in zip(placement.slots.tolist(), placement.rows.tolist(), strict=True):
            assert before[slot] < 0 or counts[row] > counts[int(before[slot])]
            replaced += before[slot] >= 0
        left_out = set(misses.tolist()) - set(placement.rows.tolist())
        if left_out and len(placement.rows):
            assert min(counts[r] for r in placement.rows.tolist()) >= max(counts[r] for r in left_out)
    assert replaced > 0
    assert cache.policy.notes[:].tolist() == [counts[row] for row in range(BASES[-1])]


class CountsApart(Lfu):
    """The same decisions, by counts of all rows in an array of their own."""

    def __init__(self, space: RowSpace) -> None:
        super().__init__(space)
        self.counts = np.zeros(space.rows, np.int32)

    def admit(self, hits: np.ndarray, misses: np.ndarray, looked_up: np.ndarray) -> Placement:
        add_lookups(self.counts, looked_up, self.times)
        held = self.space.residents.row_of_slot
        wanted = misses[np.argsort(-self.counts[misses], kind="stable")]
        fresh = np.arange(self.used, min(self.space.slots, self.used + len(wanted)), dtype=np.int32)
        rest, victims = wanted[len(fresh) :], np.empty(0, np.int32)
        if len(rest) and self.used:
            if self.next + len(rest) > len(self.candidates):
                counts = self.counts[held[: self.used]]
                size = min(max(4 * len(rest), self.used // 8), self.used)
                least = np.argpartition(counts, size - 1)[:size]
                least = least[np.lexsort((least, counts[least]))]
                self.candidates, self.candidate_counts = least.astype(np.int32), counts[least]
                self.next = 0
            window = slice(self.next, self.next + len(rest))
            victims = self.candidates[window]
            self.next += len(victims)
            same = self.counts[held[victims]] == self.candidate_counts[window]
            victims = victims[same & ~np.isin(victims, hits)]
        self.used += len(fresh)
        better = self.counts[rest[: len(victims)]] > self.counts[held[victims]]
        victims = victims[: int(better.argmin()) if not better.all() else len(better)]
        slots = np.concatenate((fresh, victims))
        return Placement(slots, wanted[: len(slots)])


@pytest.mark.parametrize("slots", [1, 13, 64, 399])
def test_lfu_decides_as_with_counts_beside_the_map(slots: int) -> None:
    one, other = (Cache(kind(RowSpace(BASES, slots))) for kind in (Lfu, CountsApart))
    for rows in streams(5):
        for mine, theirs in zip(one.batch(rows)[:2], other.batch(rows)[:2], strict=True):
            assert mine.slots.tolist() == theirs.slots.tolist()
            assert mine.rows.tolist() == theirs.rows.tolist()
    assert one.policy.notes[:].tolist() == other.policy.counts.tolist()


def test_notes_go_with_rows_and_stay_at_the_highest() -> None:
    residents, row = Residents(9, 2), np.array([4])
    notes = residents.keep_notes()
    notes.add(np.array([4, 5, 4]), None, unit=2)
    notes[row] = notes[row] | 1
    for slot in (0, 1):
        residents.put(np.array([slot], np.int32), np.array([4, 5])[slot : slot + 1])
        assert notes[:].tolist() == [0, 0, 0, 0, 5, 2, 0, 0, 0]
    residents.put(np.array([0], np.int32), np.array([7]))  # row 4 leaves
    assert residents.empty(np.array([1], np.int32)).tolist() == [5]
    assert notes[:].tolist() == [0, 0, 0, 0, 5, 2, 0, 0, 0]
    assert residents.slot_of(np.arange(9)).tolist() == [-1] * 7 + [0, -1]
    most = np.array([2**31 - 1], np.int32)
    notes.add(row, most, unit=2)
    assert notes[row] == MOST, "an odd one: the mark is kept"
    notes.add(np.array([5]), most, unit=2)
    assert notes[np.array([5])] == MOST - 1
    assert residents._where.min() == NOTED - MOST > np.iinfo(np.int32).min
    for rows, values in ((9, 1), (-1, 1), (3, -1)):
        with pytest.raises(IndexError):
            notes[np.array([rows])] = np.array([values], np.int32)


def test_counts_of_an_earlier_checkpoint_go_on() -> None:
    policy = Lfu(RowSpace(BASES, 5))
    counts = np.arange(BASES[-1], dtype=np.int32)
    counts[-1] = 2**31 - 1
    state = policy.state_dict() | {"counts": counts}
    policy.check_state(state)
    policy.load_state_dict(state)
    assert policy.state_dict()["counts"].tolist() == [*range(BASES[-1] - 1), MOST]


def test_lfu_finds_the_most_used_rows_and_keeps_them_through_a_scan() -> None:
    slots, rng = 40, np.random.default_rng(0)
    hot = rng.permutation(BASES[-1])[: slots // 2]
    residents = {}
    for kind in (Lfu, Lru):
        cache = Cache(kind(RowSpace(BASES, slots)))
        for step in range(40):
            scan = (np.arange(50) + 50 * step) % BASES[-1]
            cache.batch(np.concatenate((scan, np.repeat(hot, 3))) if step < 36 else scan)
        residents[kind] = set(cache.slot_of()) & set(hot.tolist())
    assert residents[Lfu] == set(hot.tolist())
    assert len(residents[Lru]) < len(hot), "the scan must be able to evict, or the test shows nothing"


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("stop", [0, 1, 17, 40])
def test_a_restored_policy_decides_the_same(name: str, stop: int) -> None:
    slots = 0 if name == "nocache" else 64
    batches = list(streams(9))
    first, second = (Cache(MAKERS[name](RowSpace(BASES, slots))) for _ in range(2))
    for rows in batches[:stop]:
        first.batch(rows)
    used = np.flatnonzero(first.row_of_slot >= 0).astype(np.int32)
    second.policy.space.residents.put(used, first.row_of_slot[used])
    second.policy.load_state_dict(copy.deepcopy(first.policy.state_dict()))
    for rows in batches[stop:]:
        first.batch(rows)
        second.batch(rows)
        np.testing.assert_array_equal(first.row_of_slot, second.row_of_slot)
    assert_same_state(first.policy.state_dict(), second.policy.state_dict())


def test_nocache_admits_nothing() -> None:
    cache = Cache(NoCache(RowSpace(BASES, 0)))
    for rows in streams(1):
        moved, admitted, hits, _ = cache.batch(rows)
        assert len(moved.slots) == len(admitted.slots) == len(hits) == 0


def test_hot_set_moves_in_chunks_and_keeps_what_stays() -> None:
    policy = HotSet(RowSpace(BASES, 50), np.arange(50), chunk=20)
    cache, nothing = Cache(policy), np.empty(0, np.int64)
    assert [len(cache.batch(nothing)[0].slots) for _ in range(4)] == [20, 20, 10, 0]
    slots = cache.slot_of()
    wanted = np.arange(15, 60)
    assert policy.retarget(wanted) == 10
    while len(cache.batch(nothing)[0].slots):
        pass
    now = cache.slot_of()
    assert set(wanted.tolist()) <= set(now)
    assert all(now[row] == slots[row] for row in range(15, 50)), "rows that stay keep their slots"


def test_hot_set_retargeted_while_it_moves() -> None:
    policy = HotSet(RowSpace(BASES, 50), np.arange(50), chunk=20)
    cache, nothing = Cache(policy), np.empty(0, np.int64)
    cache.batch(nothing)
    kept = cache.slot_of()
    assert policy.retarget(np.arange(10, 60)) == 40
    while len(cache.batch(nothing)[0].slots):
        pass
    now = cache.slot_of()
    assert sorted(now) == list(range(10, 60)) == policy.target.tolist()
    assert all(now[row] == slot for row, slot in kept.items() if row >= 10)


@pytest.mark.parametrize(("slots", "rows"), [([3], [1]), ([-1], [1]), ([0], [9]), ([0], [-1]), ([0, 1], [1])])
def test_a_slot_or_row_that_does_not_exist_changes_nothing(slots: list[int], rows: list[int]) -> None:
    residents = Residents(9, 3)
    residents.put(np.array([2], np.int32), np.array([5]))
    with pytest.raises(IndexError):
        residents.put(np.array([1, *slots], np.int32), np.array([4, *rows]))
    assert residents.row_of_slot.tolist() == [-1, -1, 5]
    assert residents.slot_of(np.arange(9)).tolist() == [-1] * 5 + [2] + [-1] * 3


@pytest.mark.parametrize("times", [None, np.ones(2, np.int32)])
def test_a_row_in_no_table_is_not_counted(times: Any) -> None:
    for wrong in (7, -1):
        with pytest.raises(IndexError, match="a row that is in no table"):
            add_lookups(np.zeros(7, np.int32), np.array([3, wrong]), times)
    with pytest.raises(IndexError, match="a slot that does not exist"):
        distinct_slots(np.array([2, 3], np.int32), 3)
