"""The rows of ids that grow, against a dictionary: who gets a row, who loses it, and what an undo leaves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import pytest

from recpipe.data.id_mapper import MISSING_KEY
from recpipe.plugin.tables import Growth
from recpipe.tables.dynamic.id_map import IdMap
from recpipe.tables.dynamic.loops import DEFAULT_ROW, FIRST_ROW, MISSING_ROW

GROWTHS = [
    Growth("t"),
    Growth("t", evict="lfu"),
    Growth("t", evict="age", max_age=3),
    Growth("t", evict="none"),
    Growth("t", admit_after=3, evict="lfu"),
    Growth("t", admit_after=2),
]


def batches(seed: int = 0, count: int = 50) -> list[np.ndarray]:
    """Skewed keys, among them missing ones and large ones."""
    rng = np.random.default_rng(seed)
    made = [(rng.zipf(1.2, 60) % 500 + rng.integers(0, 3)).astype(np.int64) for _ in range(count)]
    for keys in made:
        keys[keys % 7 == 0] -= 2**62
        keys[keys % 11 == 0] = MISSING_KEY
    return made


class Dictionary:
    """The same decisions in the words of the documentation."""

    def __init__(self, growth: Growth, capacity: int) -> None:
        self.growth, self.capacity = growth, capacity
        self.rows: dict[int, int] = {}
        self.seen: dict[int, tuple[int, int]] = {}
        self.waiting: dict[int, int] = {}
        self.now = 0

    def plan(self, keys: Sequence[int]) -> list[int]:
        self.now += 1
        missed: dict[int, int] = {}
        known = set(self.rows)
        for key in keys:
            if key in known:
                self.seen[key] = self.seen[key][0] + 1, self.now
            elif key != MISSING_KEY:
                missed[key] = missed.get(key, 0) + 1
        for key, count in missed.items():
            self.waiting[key] = self.waiting.get(key, 0) + count
        for key in missed:
            if self.waiting[key] < self.growth.admit_after:
                continue
            row = self._free()
            if row is None:
                break
            times = self.waiting.pop(key) if self.growth.admit_after > 1 else missed[key]
            self.rows[key], self.seen[key] = row, (times, self.now)
        return [MISSING_ROW if key == MISSING_KEY else self.rows.get(key, DEFAULT_ROW) for key in keys]

    def _free(self) -> int | None:
        if len(self.rows) < self.capacity - FIRST_ROW:
            return FIRST_ROW + len(self.rows)
        ages = ((self.now - last, key) for key, (_, last) in self.seen.items())
        able = {key for age, key in ages if age > (self.growth.max_age if self.growth.evict == "age" else 0)}
        if not able or self.growth.evict == "none":
            return None

        def goes_first(key: int) -> tuple[int, int, int]:
            times, last = self.seen[key]
            return times if self.growth.evict == "lfu" else 0, last, self.rows[key]

        gone = min(able, key=goes_first)
        del self.seen[gone]
        return self.rows.pop(gone)


@pytest.mark.parametrize("capacity", [12, 40, 300])
@pytest.mark.parametrize("growth", GROWTHS, ids=lambda g: f"{g.evict}-{g.admit_after}")
def test_decides_what_a_dictionary_decides(growth: Growth, capacity: int) -> None:
    own, plain, given = IdMap(growth, capacity, 1), Dictionary(growth, capacity), batches()
    rng = np.random.default_rng(capacity)
    for keys, ahead in zip(given, [*given[1:], given[0]], strict=True):
        rows, turn = own.plan(keys)
        if rng.random() < 0.4:  # planned ahead, and not trained
            own.undo(own.plan(ahead)[1])
        if rng.random() < 0.4:
            own.undo(turn)
            rows, _ = own.plan(keys)
        assert rows.tolist() == plain.plan(keys.tolist())
    assert own.occupied == len(plain.rows)
    assert own.rows_of(np.array(list(plain.rows))).tolist() == list(plain.rows.values())


def sightings_of_one_key(growth: Growth) -> Iterator[int]:
    own = IdMap(growth, 5000, 1)
    others = np.arange(10**6, 10**6 + 200)
    for batch in range(400):
        rows, _ = own.plan(np.append(others + 200 * batch, 7))
        yield int(rows[-1])


def test_a_sketch_admits_early_at_worst() -> None:
    exact, sketched = (
        [row > DEFAULT_ROW for row in sightings_of_one_key(Growth("t", admit_after=40, admit_by=by))].index(
            True
        )
        for by in ("exact", "sketch")
    )
    assert exact == 39
    assert sketched <= exact


def test_a_sketch_is_undone() -> None:
    growth = Growth("t", admit_after=3, admit_by="sketch", evict="lfu")
    own, again, given = IdMap(growth, 60, 1), IdMap(growth, 60, 1), batches()
    for keys, ahead in pairwise(given):
        rows, _ = own.plan(keys)
        own.undo(own.plan(ahead)[1])
        assert rows.tolist() == again.plan(keys)[0].tolist()


def test_chance_is_that_of_the_seed_and_of_each_sighting() -> None:
    keys = np.arange(10_000)
    growth = Growth("t", admit_probability=0.25)
    shares = []
    for seed in (1, 1, 2):
        own = IdMap(growth, 20_000, seed)
        shares.append([own.plan(keys)[0] > DEFAULT_ROW for _ in range(4)])
    assert np.array_equal(shares[0], shares[1])
    assert not np.array_equal(shares[0], shares[2])
    for batch, found in enumerate(shares[0], 1):
        assert abs(found.mean() - (1 - 0.75**batch)) < 0.02


def test_a_policy_of_a_plugin_decides() -> None:
    """Rows whose ids were seen most often go first."""
    own = IdMap(Growth("t", evict="mine"), 6, 1, lambda times, seen, now: -times)
    own.plan(np.array([1, 1, 2, 3, 3, 3, 4]))
    rows, turn = own.plan(np.array([5, 6]))
    assert turn.before[:, 0].tolist() == [3, 1]
    assert own.rows_of(np.array([2, 4, 5, 6, 1, 3])).tolist() == [3, 5, *rows.tolist(), -1, -1]


def test_a_full_map_takes_24_bytes_a_row() -> None:
    own = IdMap(Growth("t"), 200_000, 1)
    for low in range(0, 300_000, 2_000):
        own.plan(np.arange(low, low + 2_000))
    assert own.content.figures.evicted > 0
    assert own.nbytes <= 24 * 200_000
