"""The rows of ids that grow, against a dictionary: who gets a row, who loses it, and what an undo leaves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from recpipe.common.loops import load_loops
from recpipe.data.id_mapper import MISSING_KEY
from recpipe.plugin.errors import PluginError
from recpipe.plugin.tables import Growth
from recpipe.tables.dynamic import loops
from recpipe.tables.dynamic.id_map import IdMap
from recpipe.tables.dynamic.loops import BUCKET, DEFAULT_ROW, FIRST_ROW, MISSING_ROW
from recpipe.tables.dynamic.saved import load_map, save_map

HERE = "tests.tables.test_id_map"


def young_and_rare(keys: np.ndarray, times: np.ndarray, seen: np.ndarray, now: int) -> np.ndarray:
    """A policy as a package brings it: whoever was seen often lately stays, and negative keys stay."""
    return times / (1.0 + now - seen) + 100.0 * (keys < 0)


GROWTHS = [
    Growth("t"),
    Growth("t", evict="lfu"),
    Growth("t", evict="age", max_age=3),
    Growth("t", evict="none"),
    Growth("t", admit_after=3, evict="lfu"),
    Growth("t", admit_after=2),
    Growth("t", evict=f"{HERE}:young_and_rare"),
    Growth("t", evict=f"{HERE}:young_and_rare", admit_after=2),
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

        def goes_first(key: int) -> tuple[float, int, int]:
            times, last = self.seen[key]
            if ":" in self.growth.evict:
                return times / (1.0 + self.now - last) + (100.0 if key < 0 else 0.0), 0, self.rows[key]
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


@pytest.mark.parametrize(
    "growth",
    [
        Growth("t", admit_after=3, evict="lfu"),
        Growth("t", admit_after=3, admit_by="sketch"),
        Growth("t", admit_probability=0.4, evict="age", max_age=2),
    ],
    ids=lambda growth: growth.admit_by + growth.evict,
)
def test_a_saved_map_decides_as_the_one_that_goes_on(growth: Growth, tmp_path: Path) -> None:
    own, given = IdMap(growth, 40, 1), batches()
    for keys in given[:30]:
        own.plan(keys)
    save_map(tmp_path, growth, 40, own.content.copied())
    again, fresh = IdMap(growth, 40, 1), IdMap(growth, 40, 1)
    again.load(load_map(tmp_path, growth, 40, 1))
    others = []
    for keys in given[30:]:
        rows, same, other = (each.plan(keys)[0].tolist() for each in (own, again, fresh))
        assert rows == same
        others.append(rows == other)
    assert not all(others)
    assert own.content.figures == again.content.figures


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


def too_few(keys: np.ndarray, times: np.ndarray, seen: np.ndarray, now: int) -> np.ndarray:
    return times[1:]


def no_numbers(keys: np.ndarray, times: np.ndarray, seen: np.ndarray, now: int) -> np.ndarray:
    return np.full(len(keys), np.nan)


def raises(keys: np.ndarray, times: np.ndarray, seen: np.ndarray, now: int) -> np.ndarray:
    raise KeyError(7)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("lifo", "no eviction policy 'lifo'"),
        (f"{HERE}:lifo", f"eviction policy lifo .* cannot be imported from '{HERE}:lifo'"),
        (f"{HERE}:HERE", "is no function"),
        (f"{HERE}:too_few", r"gives int64 \[9\], not a finite number for each of 10 rows"),
        (f"{HERE}:no_numbers", "gives float64 .* not a finite number"),
        (f"{HERE}:raises", "part eviction, raised KeyError: 7"),
    ],
)
def test_a_policy_that_cannot_be_used_is_one_line(name: str, fault: str) -> None:
    own = IdMap(Growth("t", evict=name), 12, 1)
    assert own.rows_of(np.array([4])).tolist() == [-1], "lookups ask no policy"

    def planned() -> None:
        for low in (0, 10):
            own.plan(np.arange(low, low + 10))

    with pytest.raises(PluginError, match=fault) as caught:
        planned()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bits", [10, 29, 31, 32])
def test_keys_with_the_same_mark_have_rows_of_their_own(bits: int) -> None:
    """Of a table with ``bits`` bits of rows, whose index has the others of 32 for a mark."""
    load_loops()
    rng, used = np.random.default_rng(bits), 1000
    keys, records = rng.integers(-(2**62), 2**62, 2 * used), np.zeros(2 * used, np.int64)
    records[::2] = keys[:used]
    index, taken = (np.zeros(160 * BUCKET, np.uint32), bits), np.arange(FIRST_ROW, used)
    loops.insert(taken, *index, records)
    gone = rng.permutation(taken)[:300]
    expected = np.append(np.arange(used), np.full(used, -1))
    expected[:FIRST_ROW] = expected[gone] = -1
    loops.remove(gone, *index, records)
    rows = np.empty(2 * used, np.int64)
    assert loops.look_up(keys, *index, records, rows, 0, rows, rows) == (0, used + FIRST_ROW + len(gone))
    assert rows.tolist() == expected.tolist()


def test_a_full_map_takes_24_bytes_a_row() -> None:
    own = IdMap(Growth("t"), 200_000, 1)
    for low in range(0, 300_000, 2_000):
        own.plan(np.arange(low, low + 2_000))
    assert own.content.figures.evicted > 0
    assert own.nbytes <= 24 * 200_000
