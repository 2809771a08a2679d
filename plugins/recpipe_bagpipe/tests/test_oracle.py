"""The oracle: its invariants, and plans carried out by a model of trainers and store, event by event."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields

import numpy as np
import pytest
from numpy.typing import NDArray
from recpipe_bagpipe.oracle import OraclePlan, plan

from recpipe.errors import UserError

Rows = NDArray[np.int64]
Shares = tuple[Rows, ...]
ROWS, PRIME = 120, (1 << 61) - 1
CASES = [(1, 1), (2, 1), (4, 1), (4, 3), (9, 2), (10, 4), (16, 5)]


def zipf_stream(trainers: int, batches: int, seed: int, per_share: int = 7) -> list[Shares]:
    """Shares of popular and rare rows, with repeats; now and then one is empty."""
    random = np.random.default_rng(seed)
    weights = 1 / np.arange(1, ROWS + 1) ** 1.1
    sizes = random.integers(0, per_share + 1, (batches, trainers))
    sizes[:, 0] += 1
    draw = random.permutation(ROWS)
    return [
        tuple(draw[random.choice(ROWS, size, p=weights / weights.sum())] for size in batch) for batch in sizes
    ]


def members(mask: np.uint64) -> list[int]:
    """The trainers in a set."""
    return [t for t in range(64) if int(mask) >> t & 1]


def step(value: int, x: int, users: Sequence[int]) -> int:
    """A row's value after batch ``x``: each user adds what depends on the value that it read."""
    return (3 * value + sum((trainer + 2) * value + x for trainer in users)) % PRIME


class Model:
    """Trainers with caches, and a store; a read happens as early as the gate allows it."""

    def __init__(self, plans: list[OraclePlan], trainers: int, slots: int | None, early: bool) -> None:
        self.plans, self.slots = plans, slots
        self.early = early
        """Negative control: a batch's rows are read just before the round that its gate names."""
        self.store = {row: row + 1 for row in range(ROWS)}
        self.caches: list[dict[int, int]] = [{} for _ in range(trainers)]
        self.arriving: dict[int, dict[int, int]] = {}
        self.pending: dict[int, int] = {}
        self.writes = 0

    def run(self) -> dict[int, int]:
        """The store after all batches and a last flush."""
        for made in self.plans:
            if self.early:
                self.read(made.number)
            self.clean(made)
            if not self.early:
                self.read(made.number)
            self.check_budget()
            self.bring(made)
            assert self.slots is None or all(len(cache) <= self.slots for cache in self.caches)
            self.train(made)
        self.apply()
        for cache in self.caches:
            self.store.update(cache)
        return self.store

    def read(self, number: int) -> None:
        for made in self.plans:
            if made.fetch_after == number and len(made.fetch):
                assert made.number >= number, "a gate after the batch itself"
                self.arriving[made.number] = {int(r): self.store[int(r)] for r in made.rows[made.fetch]}
                if not self.early:
                    held = set().union(*self.caches)
                    assert not held & set(self.arriving[made.number]), "fetched while somebody holds it"

    def clean(self, made: OraclePlan) -> None:
        for row, holders, writer in zip(made.expired, made.expired_holders, made.writer, strict=True):
            assert int(row) not in self.pending, "expired before its last update"
            assert int(writer) in members(holders)
            assert members(holders) == [t for t, c in enumerate(self.caches) if int(row) in c]
            self.store[int(row)] = self.caches[int(writer)][int(row)]
            self.writes += 1
            for trainer in members(holders):
                del self.caches[trainer][int(row)]

    def check_budget(self) -> None:
        """Held rows and those on their way to their users fit. What is on its way to a holder that became
        known after the gate is not counted here: it may exceed the budget until its batch begins."""
        if self.slots is None:
            return
        for trainer, cache in enumerate(self.caches):
            coming = sum(
                int(made.users[at]) >> trainer & 1
                for made in self.plans
                if made.number in self.arriving
                for at in made.fetch
            )
            assert len(cache) + coming <= self.slots

    def bring(self, made: OraclePlan) -> None:
        fetched = self.arriving.pop(made.number, {})
        assert sorted(fetched) == made.rows[made.fetch].tolist()
        for at in made.fetch:
            for trainer in members(made.holders[at]):
                self.caches[trainer][int(made.rows[at])] = fetched[int(made.rows[at])]
        moved = made.handover
        for row, source, new in zip(moved.rows, moved.source, moved.new, strict=True):
            assert int(row) not in self.pending, "handed over before its last update"
            for trainer in members(new):
                assert int(row) not in self.caches[trainer]
                self.caches[trainer][int(row)] = self.caches[int(source)][int(row)]

    def train(self, made: OraclePlan) -> None:
        later: dict[int, int] = {}
        now: dict[int, int] = {}
        for row, users, holders, delayed in zip(
            made.rows, made.users, made.holders, made.delayed, strict=True
        ):
            assert members(holders) == [t for t, c in enumerate(self.caches) if int(row) in c]
            read = {self.caches[trainer][int(row)] for trainer in members(users)}
            assert len(read) == 1
            assert int(row) not in self.pending
            (later if delayed else now)[int(row)] = step(read.pop(), made.number, members(users))
        self.apply()  # as late as is allowed: while the next batch trains
        self.pending = now
        self.apply()
        self.pending = later

    def apply(self) -> None:
        for cache in self.caches:
            cache.update({row: value for row, value in self.pending.items() if row in cache})
        self.pending = {}


def sequential(stream: list[Shares]) -> dict[int, int]:
    """The same training with one table and no cache."""
    table = {row: row + 1 for row in range(ROWS)}
    for x, shares in enumerate(stream):
        users: dict[int, list[int]] = {}
        for trainer, share in enumerate(shares):
            for row in set(share.tolist()):
                users.setdefault(row, []).append(trainer)
        table.update({row: step(table[row], x, who) for row, who in users.items()})
    return table


@pytest.mark.parametrize("slots", [None, 45, 14])
@pytest.mark.parametrize("trainers", [1, 2, 3])
@pytest.mark.parametrize(("lookahead", "cleanup"), CASES)
def test_carried_out_plans_equal_sequential_training(
    lookahead: int, cleanup: int, trainers: int, slots: int | None
) -> None:
    if trainers > 1 and lookahead <= cleanup:
        pytest.skip("several trainers need a longer lookahead: tested below")
    for seed in range(2):
        stream = zipf_stream(trainers, 50, seed, 7 if slots != 14 else 3)
        plans = list(plan(iter(stream), lookahead, cleanup, trainers, slots))
        assert len(plans) == len(stream)
        model = Model(plans, trainers, slots, early=False)
        assert model.run() == sequential(stream)
        assert model.writes == sum(len(made.expired) for made in plans)


@pytest.mark.parametrize("trainers", [1, 2, 3])
def test_a_gate_one_round_early_reads_stale_rows(trainers: int) -> None:
    wrong = 0
    for seed in range(4):
        stream = zipf_stream(trainers, 50, seed)
        plans = list(plan(iter(stream), 4, 2, trainers))
        wrong += Model(plans, trainers, None, early=True).run() != sequential(stream)
    assert wrong == 4


@pytest.mark.parametrize("trainers", [1, 3])
@pytest.mark.parametrize(("lookahead", "cleanup"), [(4, 1), (9, 2), (16, 5)])
def test_plan_invariants(lookahead: int, cleanup: int, trainers: int) -> None:
    stream = zipf_stream(trainers, 60, 7)
    lag = int(trainers > 1)
    unions = [np.unique(np.concatenate(shares)) for shares in stream]
    last_seen: dict[int, int] = {}
    for x, made in enumerate(plan(iter(stream), lookahead, cleanup, trainers)):
        window = unions[x : x + lookahead + 1]
        assert np.array_equal(made.rows, unions[x])
        local = ~(made.critical | made.delayed)
        assert not (made.critical & made.delayed).any()
        assert all((len(members(h)) == 1) == alone for h, alone in zip(made.holders, local, strict=True))
        following = unions[x + 1] if x + 1 < len(unions) else []
        assert np.isin(made.rows[made.critical], following).all()
        assert not np.isin(made.rows[made.delayed], following).any()
        assert x % cleanup == 0 or not len(made.expired)
        assert all(last_seen[int(row)] < x - lag for row in made.expired)
        assert np.array_equal(made.expired, np.unique(made.expired))
        last_known = [x + max(i for i, rows in enumerate(window) if row in rows) for row in made.rows]
        last_seen.update(zip(made.rows.tolist(), last_known, strict=True))


def test_the_same_stream_gives_the_same_plan() -> None:
    stream = zipf_stream(3, 40, 1)
    first, second = (list(plan(iter(stream), 8, 3, 3, 30)) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        for field in fields(OraclePlan):
            if field.name != "handover":
                assert np.array_equal(getattr(a, field.name), getattr(b, field.name))
        assert all(np.array_equal(getattr(a.handover, f), getattr(b.handover, f)) for f in ("rows", "new"))


def test_a_plan_comes_as_soon_as_its_window_is_known() -> None:
    read = 0

    def counted() -> Iterator[Shares]:
        nonlocal read
        for shares in zipf_stream(1, 60, 3):
            read += 1
            yield shares

    for x, _ in enumerate(plan(counted(), 8, 2, 1)):
        assert read <= min(60, x + 8 + 2)


def test_the_window_shrinks_to_the_budget_and_costs_fetches() -> None:
    stream = zipf_stream(1, 60, 5)
    fetched = [
        sum(len(made.fetch) for made in plan(iter(stream), 32, 2, 1, slots)) for slots in (12, 30, None)
    ]
    assert fetched[0] > fetched[1] > fetched[2]


def test_a_batch_that_does_not_fit_is_refused() -> None:
    stream = [(np.arange(20),)]
    with pytest.raises(UserError, match=r"needs 20 resident rows.*resident_bytes.*batch_size"):
        list(plan(iter(stream), 4, 1, 1, slots=19))


@pytest.mark.parametrize(
    ("lookahead", "cleanup", "trainers", "name"),
    [(3, 4, 1, "lookahead"), (4, 4, 2, "lookahead"), (4, 0, 1, "cleanup"), (4, 1, 65, "trainers")],
)
def test_values_without_a_meaning_are_refused(lookahead: int, cleanup: int, trainers: int, name: str) -> None:
    with pytest.raises(UserError, match=name):
        next(plan(iter([]), lookahead, cleanup, trainers))


def test_an_empty_stream_has_no_plans() -> None:
    assert list(plan(iter([]), 4, 1, 2)) == []
