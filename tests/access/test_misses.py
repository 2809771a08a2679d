"""Predicted miss rates beside those of the caches themselves, on streams whose ids differ in kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from recpipe.access.misses import POLICIES, MissRates, RowSample
from recpipe.plugin.bags import Bags, RowIds
from recpipe.plugin.policy import RowSpace
from recpipe.tables.tiers.planner import TierPlanner
from recpipe.tables.tiers.policies import POLICIES as BUILT_IN

ROWS = 40_000
SLOTS = (2_000, 4_000, 10_000, 20_000, ROWS)
BATCH = 1_500
"""Lookups of a batch, fewer than the fewest slots."""
BATCHES = 60
POINT = 0.01
Stream = list[RowIds]


def zipf(rng: np.random.Generator) -> Stream:
    """The popular rows are the same all the time."""
    shares = np.cumsum(1 / np.arange(1, ROWS + 1) ** 1.05)
    places = rng.permutation(ROWS)
    draws = rng.random((BATCHES, BATCH)) * shares[-1]
    return [places[np.searchsorted(shares, draw)] for draw in draws]


def drifting(rng: np.random.Generator) -> Stream:
    """Each batch looks up rows near those of the batch before: what LRU is good at."""
    return [
        (np.abs(rng.normal(0, 1_500, BATCH)).astype(np.int64) + 400 * number) % ROWS
        for number in range(BATCHES)
    ]


def rates(stream: Sequence[RowIds], sample: RowSample | None = None) -> MissRates:
    found = MissRates(sample or RowSample(ROWS, np.empty(0, np.int64)), SLOTS, len(stream) // 2)
    for rows in stream:
        found.add(rows)
    return found


def missed(found: MissRates, name: str) -> np.ndarray:
    curve = getattr(found, name)
    return 1 - curve.hits / curve.lookups


def measured(policy: str, slots: int, stream: Sequence[RowIds], carry: bool = False) -> tuple[float, float]:
    """What the cache itself misses, and how many rows it reads for a batch; with ``carry``, without those
    that are in the slab already."""
    planner = TierPlanner(BUILT_IN[policy](RowSpace(np.array([0, ROWS]), slots)), carry=carry)
    misses = reads = lookups = 0
    for rows in stream:
        plan = planner.plan(Bags(rows, np.arange(len(rows) + 1), len(rows)))
        planner.commit()
        misses += plan.looked_up - plan.hits
        lookups += plan.looked_up
        reads += len(plan.fetch if carry else plan.carried_from)
    return misses / lookups, reads / len(stream)


@pytest.mark.parametrize("make", [zipf, drifting])
@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_they_are_the_caches_own(policy: str, make: Callable[[np.random.Generator], Stream]) -> None:
    stream = make(np.random.default_rng(1))
    found = rates(stream)
    shares, reads = zip(*(measured(policy, slots, stream) for slots in SLOTS), strict=True)
    np.testing.assert_allclose(missed(found, policy), shares, atol=POINT)
    np.testing.assert_allclose(getattr(found, policy).fetched(), reads, rtol=0.03)


@pytest.mark.parametrize("make", [zipf, drifting])
def test_rows_that_stay_in_the_slab_are_counted(make: Callable[[np.random.Generator], Stream]) -> None:
    stream = make(np.random.default_rng(1))
    found = rates(stream)
    carried = found.lfu.carried / found.lfu.batches
    for number, slots in enumerate(SLOTS[:2]):
        _, reads = measured("lfu", slots, stream, carry=True)
        _, whole = measured("lfu", slots, stream)
        assert reads < whole, "some stay"
        assert found.lfu.fetched()[number] - carried[number] == pytest.approx(reads, rel=0.03)
    assert not found.lru.carried.any(), "lru gives them slots, as long as a batch fits"


def test_the_order_matters_to_lru_alone() -> None:
    stream = drifting(np.random.default_rng(1))
    mixed = np.concatenate(stream)
    np.random.default_rng(2).shuffle(mixed)
    in_order, shuffled = rates(stream), rates(np.split(mixed, BATCHES))
    assert missed(shuffled, "lru")[1] > missed(in_order, "lru")[1] + 10 * POINT
    np.testing.assert_allclose(shuffled.che(), in_order.che(), atol=1e-9)


def test_ages_of_a_cycle() -> None:
    """Batches 0 1 2 0 1 2 .. of 10 rows of their own: LRU misses all of them below 30 slots, and none at
    30."""
    found = MissRates(RowSample(30, np.empty(0, np.int64)), [10, 20, 25, 30], 6)
    for number in range(12):
        found.add(np.arange(10) + 10 * (number % 3))
    np.testing.assert_allclose(missed(found, "lru"), [1, 1, 1 - 0.5 * 0.75, 0.25])
    np.testing.assert_allclose(found.lru.fetched(), [10, 10, 6.25, 2.5])
    rows, never = found.windows()
    np.testing.assert_allclose(rows[:3], [10, 20, 30], rtol=0.2)
    np.testing.assert_allclose(never[:4], [120, 120, 30, 30])


def test_ranks_of_a_hot_set() -> None:
    """Row 0 has half of the lookups, rows 1 and 2 a quarter each: three slots miss nothing after learning."""
    found = MissRates(RowSample(8, np.empty(0, np.int64)), [0, 1, 2, 3], 2)
    for _ in range(4):
        found.add(np.array([0, 0, 1, 2]))
    np.testing.assert_allclose(missed(found, "hot"), [1, 0.5, 0.25, 0])
    assert found.hot.batches == 2


@pytest.mark.parametrize("name", POLICIES)
def test_a_sample_tells_the_same(name: str) -> None:
    stream = zipf(np.random.default_rng(3))
    counts = np.bincount(np.concatenate(stream[:10]), minlength=ROWS)
    sample = RowSample(ROWS, np.argsort(-counts)[:500], tracked=1 << 13)
    assert sample.shift == 3
    np.testing.assert_allclose(
        missed(rates(stream, sample), name), missed(rates(stream), name), atol=2 * POINT
    )


def test_a_sample_without_the_popular_rows_weighs_them_wrongly() -> None:
    stream = zipf(np.random.default_rng(3))
    blind = [
        abs(
            missed(rates(stream, RowSample(ROWS + more, np.empty(0, np.int64), tracked=1 << 9)), "lfu")[0]
            - whole
        )
        for whole in [missed(rates(stream), "lfu")[0]]
        for more in (0, 40_000, 90_000)
    ]
    assert max(blind) > 2 * POINT


def test_a_sample_follows_each_row_once() -> None:
    sample = RowSample(1_000_000, np.arange(5) * 1_000, tracked=1 << 12)
    numbers = sample.of(np.arange(1_000_000))
    assert len(np.unique(numbers)) == len(numbers)
    assert numbers.max() < sample.size
    stood_for = sample.weights[numbers].sum()
    assert abs(stood_for - 1_000_000) < 60_000


def test_che_tells_an_unordered_stream() -> None:
    stream = zipf(np.random.default_rng(4))
    found = rates(stream)
    first = missed(found, "lru")[-1]
    # Che knows no first lookups: the two agree where these are few beside the other misses.
    np.testing.assert_allclose(found.che()[0], missed(found, "lru")[0], atol=first)
    assert found.che()[-1] == 0
