"""Plans against a model that moves row names instead of records."""

from __future__ import annotations

import copy
from contextlib import closing
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.common import loops
from recpipe.common.loops import ALONE, Spread
from recpipe.errors import DataError
from recpipe.plugin.bags import Bags, RowIds, Slots, distinct
from recpipe.plugin.policy import CachePolicy, Placement, RowSpace
from recpipe.plugin.residents import IN_STORE, NOTED
from recpipe.plugin.tables import SparseFeature, TableOptimizer, TableSet
from recpipe.tables.rows import checked_rows, table_bags
from recpipe.tables.tiers.gpu_lookups import Finder, GpuBags, GpuLookups
from recpipe.tables.tiers.lookups import CpuLookups, parted
from recpipe.tables.tiers.plan import TierPlan
from recpipe.tables.tiers.planner import TierPlanner
from recpipe.tables.tiers.policies import Lfu, Lru
from recpipe.tables.tiers.transfer import Transfer
from tests.tables.samples import MAKERS, table_set

BASES = np.array([0, 40, 400])
FEATURES = 2


class Swapping(CachePolicy):
    """Moves rows in and out at random: slots that this batch looks up, rows that it does not."""

    def __init__(self, space: RowSpace) -> None:
        super().__init__(space)
        self.step = 0

    def migrate(self, rows: RowIds) -> Placement:
        rng = np.random.default_rng(self.step)
        self.step += 1
        slots = rng.permutation(self.space.slots)[: self.space.slots // 3].astype(np.int32)
        free = np.setdiff1d(np.arange(self.space.rows), self.space.residents.rows)
        return Placement(slots, rng.permutation(free)[: len(slots)])

    def admit(self, hits: Slots, misses: RowIds, looked_up: RowIds) -> Placement:
        empty = np.flatnonzero(self.space.residents.row_of_slot < 0).astype(np.int32)
        count = min(len(empty), len(misses) // 2)
        return Placement(empty[:count], misses[:count])

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state) -> None:
        self.step = state["step"]


class Noting(Swapping):
    """Counts lookups in notes and beside them."""

    def __init__(self, space: RowSpace) -> None:
        super().__init__(space)
        self.notes, self.counts = space.residents.keep_notes(), np.zeros(space.rows, np.int32)

    def migrate(self, rows: RowIds) -> Placement:
        self._count(rows)
        return super().migrate(rows)

    def admit(self, hits: Slots, misses: RowIds, looked_up: RowIds) -> Placement:
        self._count(misses)
        return super().admit(hits, misses, looked_up)

    def _count(self, rows: RowIds) -> None:
        self.notes.add(rows, None)
        np.add.at(self.counts, rows, 1)


KINDS = {**MAKERS, "swapping": Swapping, "noting": Noting}


def places_of(where: Slots) -> Slots:
    """The map without notes."""
    return np.where(where <= NOTED, IN_STORE, where)


def planner_of(kind: str, carry: bool, slots: int = 50, threads: Spread = ALONE) -> TierPlanner:
    space = RowSpace(BASES, 0 if kind == "nocache" else slots, spread=threads)
    return TierPlanner(KINDS[kind](space), carry)


def random_bags(rng: np.random.Generator, size: int, longest: int = 4) -> Bags:
    """Bags of 0 to ``longest`` skewed rows, with repeats within a bag."""
    lengths = rng.integers(0, longest + 1, FEATURES * size)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    feature = np.repeat(np.arange(FEATURES), lengths.reshape(FEATURES, size).sum(axis=1))
    rows = (rng.random(offsets[-1]) ** 3 * np.diff(BASES)[feature]).astype(np.int64) + BASES[feature]
    return Bags(rows, offsets, size)


def batches(count: int = 40, seed: int = 2) -> list[Bags]:
    rng = np.random.default_rng(seed)
    return [
        random_bags(rng, int(rng.choice([1, 2, 17, 40])), int(rng.choice([0, 1, 4]))) for _ in range(count)
    ]


TABLES = TableSet.one_each(
    [SparseFeature(name, int(rows)) for name, rows in zip("ab", np.diff(BASES), strict=True)],
    2,
    TableOptimizer("sgd", 0.1),
    0,
)
FORMS = ("each", "distinct")
"""Planning is told every lookup, or, as on a GPU, the distinct rows."""


def given(bags: Bags, form: str) -> Bags | GpuBags:
    """``bags`` in this form."""
    if form == "each":
        return bags
    ends = bags.offsets[:: bags.batch_size]
    ids = bags.indices - np.repeat(BASES[:-1], np.diff(ends))
    weights = None if bags.weights is None else torch.from_numpy(bags.weights)
    sparse = KeyedJaggedTensor(
        ["a", "b"], torch.from_numpy(ids), weights, lengths=torch.from_numpy(np.diff(bags.offsets))
    )
    tables = replace(TABLES, weighted=weights is not None)
    return Finder(tables, Transfer(torch.device("cpu")), ALONE).bags(sparse)


class Places:
    """Where each row is, moved as ``tiered`` moves records: fetch, then departures, then arrivals."""

    def __init__(self, slots: int, rows: int) -> None:
        self.slots = np.full(slots, -1, np.int64)
        self.slab = np.empty(0, np.int64)
        self.store = np.ones(rows, bool)

    def carry_out(self, plan: TierPlan, ahead: bool) -> None:
        """``ahead``: the fetch is made before the last batch's rows have been written back."""
        evicted = plan.evicted
        assert np.array_equal(self.slots[plan.slots], evicted)
        departures = np.concatenate((self.slab, evicted))
        carried = plan.carried_from[plan.carried_from >= 0]
        arrivals = np.concatenate((plan.placed, plan.slab))
        arriving = (
            np.where(plan.carried_from >= 0, departures[plan.carried_from], -1) if len(departures) else -1
        )
        assert np.array_equal(
            arriving[plan.carried_from >= 0] if len(carried) else [], arrivals[plan.carried_from >= 0]
        )
        assert len(np.unique(carried)) == len(carried)
        if ahead:
            assert self.store[plan.fetch].all(), "fetched before it was written"
        written = np.delete(departures, carried)
        written = written[written >= 0]
        assert not self.store[written].any()
        self.store[written] = True
        assert self.store[plan.fetch].all()
        assert len(np.unique(arrivals)) == len(arrivals), "a row arrives twice"
        self.store[plan.fetch] = False
        self.slots[plan.slots] = plan.placed
        self.slab = plan.slab

    def check(self, planner: TierPlanner) -> None:
        """Every row is in exactly one place, and the planner's map says which."""
        times = self.store.astype(int)
        for place in (self.slots[self.slots >= 0], self.slab):
            np.add.at(times, place, 1)
        assert (times == 1).all()
        used = np.flatnonzero(self.slots >= 0)
        where = np.full(len(times), -1)
        where[self.slots[used]] = used
        where[self.slab] = -2 - np.arange(len(self.slab))
        assert np.array_equal(places_of(planner.where), where)
        assert np.array_equal(planner.row_of_slot, self.slots)


def lookups_of(plan: TierPlan, bags: Bags | GpuBags, pooled: bool = True) -> CpuLookups | GpuLookups:
    """The lookups of ``bags``, once the rows of their plan have moved."""
    if isinstance(bags, GpuBags):
        return GpuLookups(bags, plan.where, pooled, bags.batch_size)
    return parted(bags, plan.where, pooled)


def looked_up(
    lookups: CpuLookups | GpuLookups, places: Places, order: np.ndarray | None = None, first: int = 0
) -> list[list[int]]:
    """Rows of each bag as the lookups find them, sorted; bags in the batch's own order. ``first``: the first
    sample in ``order`` that may need the slab."""
    size = lookups.batch_size
    (indices, offsets), (slab_indices, slab_offsets) = (
        (bags[0].numpy(), bags[1].numpy()) for bags in lookups.tiers()
    )
    order = np.arange(size) if order is None else order
    found: list[list[int]] = [[] for _ in range(FEATURES * size)]
    for feature in range(FEATURES):
        for position in range(size):
            bag = feature * size + position
            rows = places.slots[indices[offsets[bag] : offsets[bag + 1]]].tolist()
            if position >= first:
                cold = feature * (size - first) + position - first
                low, high = slab_offsets[cold : cold + 2]
                rows += places.slab[slab_indices[low:high]].tolist()
            found[feature * size + order[position]] = sorted(rows)
    return found


def expected(bags: Bags) -> list[list[int]]:
    return [sorted(bags.indices[a:b].tolist()) for a, b in zip(bags.offsets, bags.offsets[1:], strict=False)]


def assert_same_plan(left: TierPlan, right: TierPlan) -> None:
    for field in fields(TierPlan):
        np.testing.assert_array_equal(getattr(left, field.name), getattr(right, field.name), field.name)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("carry", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_is_in_exactly_one_place(kind: str, carry: bool, form: str) -> None:
    planner = planner_of(kind, carry)
    places = Places(planner.space.slots, planner.space.rows)
    for bags in batches():
        residents = set(places.slots[places.slots >= 0].tolist())
        plan = planner.plan(asked := given(bags, form))
        places.carry_out(plan, ahead=carry)
        planner.commit()
        places.check(planner)
        assert looked_up(lookups_of(plan, asked), places) == expected(bags)
        assert len(plan.slab) <= len(np.unique(bags.indices))
        assert not set(plan.slab.tolist()) - set(bags.indices.tolist()), "the slab holds rows nobody looks up"
        if not carry:
            still = residents & set(places.slots.tolist())
            assert not set(plan.fetch.tolist()) & still, "a resident row is fetched"


def test_fetching_ahead_without_carrying_would_read_stale_rows() -> None:
    planner = planner_of("nocache", carry=False)
    places = Places(0, planner.space.rows)

    def run() -> None:
        for bags in batches():
            places.carry_out(planner.plan(bags), ahead=True)
            planner.commit()

    with pytest.raises(AssertionError, match="fetched before it was written"):
        run()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("carry", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_taken_back_comes_out_again(kind: str, carry: bool, form: str) -> None:
    planner = planner_of(kind, carry)
    assert planner.undo() is None
    for index, each in enumerate(batches()):
        bags = given(each, form)
        before = copy.deepcopy((places_of(planner.where), planner.row_of_slot, planner.slab_rows))
        first = planner.plan(bags)
        if index % 2:
            again = planner.undo()
            assert again is bags
            now = places_of(planner.where), planner.row_of_slot, planner.slab_rows
            for mine, then in zip(now, before, strict=True):
                np.testing.assert_array_equal(mine, then)
            assert_same_plan(planner.plan(again), first)
        planner.commit()
        assert planner.undo() is None, "a plan carried out cannot be taken back"


@pytest.mark.parametrize("carry", [False, True])
def test_notes_go_where_rows_go(carry: bool) -> None:
    planner = planner_of("noting", carry)
    policy, in_slab = planner.policy, 0
    for index, bags in enumerate(batches()):
        planner.plan(bags)
        np.testing.assert_array_equal(policy.notes[:], policy.counts)
        if index % 3 == 0:
            planner.undo()
            np.testing.assert_array_equal(policy.notes[:], policy.counts)
            planner.plan(bags)
        planner.commit()
        in_slab += (policy.counts[planner.slab_rows] > 0).sum()
    assert in_slab
    assert (policy.counts[policy.space.residents.rows] > 0).any()
    planner.row_of_slot[:2] = planner.row_of_slot[1::-1]  # negative control: rows that core has not moved
    planner.where[planner.row_of_slot[:2]] = 0, 1
    assert (policy.notes[:] != policy.counts).any()


@pytest.mark.parametrize("kind", ["nocache", "lru", "hot"])
def test_restored_planner_starts_with_an_empty_slab(kind: str) -> None:
    planner = planner_of(kind, carry=True)
    places = Places(planner.space.slots, planner.space.rows)
    for bags in batches():
        plan = planner.plan(bags)
        places.carry_out(plan, ahead=True)
        planner.commit()
    places.store[places.slab] = True
    places.slab = places.slab[:0]
    planner.restore(planner.row_of_slot)
    places.check(planner)


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize("size", [1, 2, 9])
def test_permuted_bags(size: int, one_hot: bool) -> None:
    rng = np.random.default_rng(size)
    for _ in range(10):
        bags = random_bags(rng, size)
        if one_hot:
            bags = Bags(np.arange(FEATURES * size), np.arange(FEATURES * size + 1), size)
        order = rng.permutation(size)
        moved = bags.permuted(order)
        slow = [
            bags.indices[bags.offsets[f * size + s] : bags.offsets[f * size + s + 1]].tolist()
            for f in range(FEATURES)
            for s in order
        ]
        assert [
            moved.indices[a:b].tolist() for a, b in zip(moved.offsets, moved.offsets[1:], strict=False)
        ] == slow
        assert moved.batch_size == size


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["nocache", "lru", "hot"])
def test_reordered_plan_looks_the_same_rows_up(kind: str, form: str) -> None:
    planner, rng = planner_of(kind, carry=True), np.random.default_rng(0)
    places = Places(planner.space.slots, planner.space.rows)
    shortened = 0
    for bags in batches():
        plan = planner.plan(asked := given(bags, form))
        places.carry_out(plan, ahead=True)
        planner.commit()
        lookups = lookups_of(plan, asked)
        warm, cold = np.flatnonzero(~lookups.needs_cold), np.flatnonzero(lookups.needs_cold)
        order = np.concatenate((rng.permutation(warm), rng.permutation(cold)))
        lookups = lookups.permuted(order, len(warm))
        assert looked_up(lookups, places, order, len(warm)) == expected(bags)
        assert len(lookups.tiers()[1][1]) == FEATURES * len(cold) + 1
        shortened += len(warm) > 0
    assert shortened > 0


@pytest.mark.parametrize("form", FORMS)
def test_needs_cold_marks_samples_with_slab_rows(form: str) -> None:
    planner = planner_of("hot", carry=True)
    for bags in batches():
        plan = planner.plan(asked := given(bags, form))
        planner.commit()
        slab = set(plan.slab.tolist())
        bag_needs = np.array([bool(slab & set(rows)) for rows in expected(bags)])
        assert (
            lookups_of(plan, asked).needs_cold.tolist()
            == bag_needs.reshape(FEATURES, -1).any(axis=0).tolist()
        )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_hits_are_lookups_of_rows_that_were_resident_before_the_batch(kind: str, form: str) -> None:
    planner = planner_of(kind, carry=True)
    hits = looked_up = 0
    for bags in batches():
        before = set(planner.space.residents.rows.tolist())
        plan = planner.plan(given(bags, form))
        planner.commit()
        assert plan.hits == sum(row in before for row in bags.indices.tolist())
        assert plan.looked_up == len(bags.indices)
        hits, looked_up = hits + plan.hits, looked_up + plan.looked_up
    assert (hits == 0) == (kind == "nocache")
    assert hits < looked_up


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_several_threads_make_the_same_plans(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "LEAST", 5)
    plans, threads = [], Spread(3)
    for planner in (planner_of(kind, carry=True), planner_of(kind, carry=True, threads=threads)):
        plans.append([])
        for bags in batches():
            bags.weights = np.arange(len(bags.indices), dtype=np.float32)
            plans[-1].append(planner.plan(bags))
            planner.commit()
    threads.close()
    assert any(len(threads.parts(plan.looked_up)) > 1 for plan in plans[0])
    for alone, shared in zip(*plans, strict=True):
        assert_same_plan(shared, alone)


@pytest.mark.parametrize("least", [5, 1 << 16])
@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_ids_are_checked_feature_by_feature(kind: type, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "LEAST", least)
    tables, threads = table_set(), Spread(2)
    ids, ends = np.array([9, 0, 599, 5, 0, 89, 3, 7], kind), np.array([0, 2, 5, 8])
    with closing(threads):
        rows = checked_rows(tables, ids, ends, threads)
        assert (rows - ids).tolist() == [0, 0, 10, 10, 10, 610, 610, 610]
        for place, wrong, words in (
            (0, 10, "id 10 of feature a is not in its table of 10 rows"),
            (4, -1, "id -1 of feature b is not in its table of 600 rows"),
            (7, 90, "id 90 of feature c is not in its table of 90 rows"),
        ):
            bad = ids.copy()
            bad[place] = wrong
            with pytest.raises(DataError, match=words):
                checked_rows(tables, bad, ends, threads)
        assert not len(checked_rows(tables, ids[:0], np.zeros(4, np.int64), threads))


@pytest.mark.parametrize(("low", "high"), [(0, 50), (0, 1 << 33), (-5, 50)])
@pytest.mark.parametrize("size", [0, 1, 200])
def test_distinct_rows_of_any_range(size: int, low: int, high: int) -> None:
    rows = np.random.default_rng(size).integers(low, high, size)
    found = distinct(rows)
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found, np.unique(rows))


class Told(Lru):
    """Keeps what it is told."""

    each_once = True

    def __init__(self, space: RowSpace) -> None:
        super().__init__(space)
        self.told: list[tuple[RowIds, RowIds, Slots, NDArray[np.int32] | None]] = []

    def admit(self, hits: Slots, misses: RowIds, looked_up: RowIds) -> Placement:
        rows = self.space.residents.row_of_slot[hits]
        self.told.append((looked_up, rows, misses, self.times))
        return super().admit(hits, misses, looked_up)


class ToldAsBefore(Told):
    """It overrides ``admit`` and says nothing of ``each_once``."""

    def admit(self, hits: Slots, misses: RowIds, looked_up: RowIds) -> Placement:
        return super().admit(hits, misses, looked_up)


@pytest.mark.parametrize("kind", [Told, ToldAsBefore])
@pytest.mark.parametrize("form", FORMS)
def test_policies_are_told_rows_as_they_ask(kind: type[Told], form: str) -> None:
    policy = kind(RowSpace(BASES, 50))
    planner = TierPlanner(policy, carry=True)
    for bags in batches():
        before = policy.space.residents.slot_of(bags.indices) >= 0
        planner.plan(given(bags, form))
        planner.commit()
        looked_up, hits, misses, times = policy.told[-1]
        np.testing.assert_array_equal(np.sort(misses), np.unique(bags.indices[~before]))
        if form == "distinct" and kind is Told:
            rows, counts = np.unique(bags.indices, return_counts=True)
            np.testing.assert_array_equal(looked_up, rows)
            np.testing.assert_array_equal(times, counts)
            np.testing.assert_array_equal(np.sort(hits), np.unique(bags.indices[before]))
        else:
            assert times is None
            np.testing.assert_array_equal(np.sort(looked_up), np.sort(bags.indices))
            np.testing.assert_array_equal(np.sort(hits), np.sort(bags.indices[before]))


def test_lfu_counts_every_lookup_in_both_forms() -> None:
    counts = []
    for form in FORMS:
        planner = planner_of("lfu", carry=True)
        for bags in batches():
            planner.plan(given(bags, form))
            planner.commit()
        assert isinstance(planner.policy, Lfu)
        counts.append(planner.policy.notes[:])
    np.testing.assert_array_equal(*counts)
    assert counts[0].sum() == sum(len(bags.indices) for bags in batches())


@pytest.mark.parametrize("pooled", [True, False])
def test_weights_go_with_their_lookups(pooled: bool) -> None:
    pairs: list[list[CpuLookups | GpuLookups]] = []
    slabs = 0
    for form in FORMS:
        planner = planner_of("hot", carry=True)
        pairs.append([])
        for bags in batches():
            bags.weights = bags.indices.astype(np.float32)
            plan = planner.plan(asked := given(bags, form))
            planner.commit()
            slabs += len(plan.slab) > 0
            lookups = lookups_of(plan, asked, pooled)
            order = np.argsort(lookups.needs_cold, kind="stable")
            pairs[-1].append(lookups.permuted(order, int((~lookups.needs_cold).sum())))
            slots, slab = pairs[-1][-1].tiers()
            np.testing.assert_array_equal(planner.row_of_slot[slots[0]], slots[2])
            np.testing.assert_array_equal(plan.slab[slab[0]], slab[2])
    assert slabs
    for one, other in zip(*pairs, strict=True):
        for mine, theirs in zip(one.tiers(), other.tiers(), strict=True):
            np.testing.assert_array_equal(mine[1], theirs[1])


LENGTHS = {"one each": [1, 1, 1, 1], "any number": [2, 0, 1, 1]}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("wrong", [-1, 40, 1 << 40])
def test_an_id_without_a_row_is_told(wrong: int, lengths: str) -> None:
    bags = torch.tensor(LENGTHS[lengths])
    finder = Finder(TABLES, Transfer(torch.device("cpu")), ALONE)
    for find in (finder.bags, finder.distinct):
        find(KeyedJaggedTensor(["a", "b"], torch.tensor([39, 0, 0, 359]), lengths=bags))
        with pytest.raises(DataError, match=f"id {wrong} of feature a is not in its table of 40 rows"):
            find(KeyedJaggedTensor(["a", "b"], torch.tensor([39, wrong, 0, 0]), lengths=bags))


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("keys", ["ab", "ba"])
def test_found_are_the_rows_that_a_cpu_looks_up(lengths: str, keys: str) -> None:
    ids = KeyedJaggedTensor([*keys], torch.tensor([5, 39, 5, 5]), lengths=torch.tensor(LENGTHS[lengths]))
    found, expected = Finder(TABLES, Transfer(torch.device("cpu")), ALONE).bags(ids), table_bags(TABLES, ids)
    np.testing.assert_array_equal(found.rows[found.which.numpy()], expected.indices)
    np.testing.assert_array_equal(found.rows, np.unique(expected.indices))
    np.testing.assert_array_equal(found.offsets.numpy(), expected.offsets)
    assert found.times.sum() == 4
