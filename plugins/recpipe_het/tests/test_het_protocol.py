"""The guarantees of bounded staleness, under random schedules of several trainers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from recpipe_het.policy import LfuOpt
from recpipe_het.tables import HetTables
from recpipe_het.tests.rig import DIM, World, batch, schedule

from recpipe.errors import UserError
from recpipe.plugin.policy import CachePolicy
from recpipe.plugin.tables import TableOptimizer
from recpipe.tables.rows import updated
from recpipe.tables.tiers.policies import Lfu, Lru

POLICIES = [Lru, Lfu, LfuOpt]


@pytest.mark.parametrize(
    ("bound", "policy"),
    [
        # Which rows are evicted is no part of the bound: each policy has one, and LRU each of them.
        pytest.param(bound, policy, marks=() if policy is Lru or bound == 3 else pytest.mark.soak)
        for bound in (0, 1, 3, 10)
        for policy in POLICIES
    ],
)
def test_staleness_is_bounded(bound: int, policy: type[CachePolicy]) -> None:
    """s against the holder, 2s per peer, N*s in all; what is due is pushed right after the update."""
    world = World(bounds=(bound,), policy=policy)
    schedule(world, seed=bound)
    workers = len(world.workers)
    assert world.stale.max() <= bound
    assert world.stale.max() == world.holder.largest_staleness, "the report's figure is the rig's"
    assert world.holder.missed is not None
    assert world.holder.missed.totals == world.missed, "and so is what reads miss"
    assert (world.missed.largest > 0) is (bound > 0)
    assert world.peer.max() <= 2 * bound
    assert world.unseen.max() <= workers * bound
    assert world.pulled <= world.asked


def test_lockstep_bounds_are_the_papers() -> None:
    """With rounds in lockstep all due pushes precede the reads: s, 2s and N*s exactly."""
    for bound in (0, 1, 3):
        world = World(bounds=(bound,))
        rng = np.random.default_rng(bound)
        for _ in range(200):
            lockstep(world, rng)
        assert world.stale.max() <= bound
        assert world.peer.max() <= 2 * bound
        assert world.unseen.max() <= len(world.workers) * bound


def read_once(world: World, who: int, row: int) -> None:
    """A step of a trainer on one row."""
    world.step(who, np.array([row]), np.ones((1, DIM), np.float32))


@pytest.mark.parametrize(("bound", "missed"), [(0, 0), (3, 2), (100, 10)])
def test_updates_that_a_peer_keeps_to_itself_are_missed(bound: int, missed: int) -> None:
    """Trainer 0 updates a row of which trainer 1 has a line. The version, of which ``largest_staleness``
    tells, does not move while trainer 0 has not pushed."""
    world = World(workers=2, bounds=(bound,))
    read_once(world, 1, 7)
    world.flush()
    for _ in range(10):
        read_once(world, 0, 7)
    read_once(world, 1, 7)
    assert world.holder.missed is not None
    totals = world.holder.missed.totals
    # With bound 3, trainer 0 pushes 4 updates twice; the 8 are over trainer 1's bound, and 2 still wait.
    assert totals.largest == missed
    assert totals.reads == 12
    assert world.holder.largest_staleness == 0, "blind"


def test_a_flush_leaves_nothing_to_miss() -> None:
    """What is pushed is taken off again, to the last update."""
    world = World(bounds=(3,))
    schedule(world, seed=6)
    world.flush()
    assert world.holder.missed is not None
    assert not world.holder.missed.waiting.any()


def lockstep(world: World, rng: np.random.Generator) -> None:
    """One round of all workers."""
    work = [batch(rng, world.rows) for _ in world.workers]
    opened = [world.start(who, rows) for who, (rows, _) in enumerate(work)]
    world.push([(who, push) for who, (push, _) in enumerate(opened)])
    for who, (_, check) in enumerate(opened):
        world.read(who, check)
    for who, (rows, gradients) in enumerate(work):
        world.finish(who, rows, gradients)


def test_a_looser_check_breaks_the_bound() -> None:
    """The negative control: pulling one update too late is seen."""
    world = World(bounds=(1,), slack=1)
    schedule(world, seed=1)
    assert world.stale.max() == world.holder.largest_staleness == 2


@pytest.mark.parametrize("updates", ["each", "summed"])
@pytest.mark.parametrize("policy", POLICIES)
def test_no_update_is_lost(policy: type[CachePolicy], updates: str) -> None:
    """After a flush versions count all updates, and values are their sums, exactly."""
    world = World(bounds=(3,), policy=policy, updates=updates)
    schedule(world, seed=5)
    world.flush()
    assert np.array_equal(world.holder.versions, sum(w.made for w in world.workers))
    assert np.array_equal(world.holder.read(np.arange(world.rows)), -world.total)


@pytest.mark.parametrize("policy", POLICIES)
def test_own_writes_are_read(policy: type[CachePolicy]) -> None:
    """One worker alone always sees the sum of its updates, whatever is evicted."""
    world = World(workers=1, bounds=(7,), policy=policy)
    rng = np.random.default_rng(2)
    for _ in range(200):
        rows, gradients = batch(rng, world.rows)
        before = -world.total[rows]
        assert np.array_equal(world.step(0, rows, gradients), before)


@pytest.mark.parametrize("updates", ["each", "summed"])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
def test_bound_zero_is_synchronous(optimizer: str, updates: str) -> None:
    """Bitwise the rank-ordered reference, with gradients that round."""
    world = World(bounds=(0,), optimizer=optimizer, updates=updates)
    reference = torch.zeros(world.rows, world.holder.store.layout.width)
    rng = np.random.default_rng(9)
    for _ in range(200):
        picked = [batch(rng, world.rows)[0] for _ in world.workers]
        work = [(rows, rng.standard_normal((len(rows), DIM)).astype(np.float32)) for rows in picked]
        opened = [world.start(who, rows) for who, (rows, _) in enumerate(work)]
        world.push([(who, push) for who, (push, _) in enumerate(opened)])
        total = torch.zeros(world.rows, DIM)
        for who, (rows, gradients) in enumerate(work):
            assert np.array_equal(world.read(who, opened[who][1]), reference[torch.from_numpy(rows)].numpy())
            total[torch.from_numpy(rows)] += torch.from_numpy(gradients)
            world.finish(who, rows, gradients)
        touched = torch.from_numpy(np.unique(np.concatenate([rows for rows, _ in work])))
        reference[touched] = updated(world.optimizer, reference[touched], total[touched])
    world.flush()
    assert np.array_equal(world.holder.read(np.arange(world.rows)), reference.numpy())


def test_several_updates_in_one_push_are_one_adagrad_step() -> None:
    """The holder's step takes the sum of the gradients; the local view is that step already."""
    world = World(workers=1, bounds=(5,), optimizer="adagrad", updates="summed")
    rows, one = np.array([3]), np.ones((1, DIM), np.float32)
    for _ in range(3):
        world.step(0, rows, one)
    zero = torch.zeros(1, 2 * DIM)
    expected = updated(TableOptimizer("adagrad", 1.0), zero, torch.full((1, DIM), 3.0)).numpy()
    assert np.array_equal(world.step(0, rows, 0 * one), expected)
    world.flush()
    assert np.array_equal(world.holder.read(rows), expected)
    assert world.holder.versions[3] == 4
    thrice = zero
    for _ in range(3):
        thrice = updated(TableOptimizer("adagrad", 1.0), thrice, torch.ones(1, DIM))
    assert not np.array_equal(expected, thrice.numpy())


@pytest.mark.parametrize("optimizer", ["adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("updates", ["each", "summed"])
def test_one_trainer_with_a_step_for_each_update_trains_as_without_a_cache(
    updates: str, optimizer: str
) -> None:
    """Whatever waits, is evicted or pushed; steps of summed gradients are the negative control."""
    world = World(workers=1, bounds=(7,), optimizer=optimizer, updates=updates)
    plain = torch.zeros(world.rows, world.holder.store.layout.width)
    rng = np.random.default_rng(11)
    furthest = 0.0
    for _ in range(200):
        rows, _ = batch(rng, world.rows)
        gradients = rng.standard_normal((len(rows), DIM)).astype(np.float32)
        seen, at = world.step(0, rows, gradients), torch.from_numpy(rows)
        furthest = max(furthest, float(np.abs(seen - plain[at].numpy()).max()))
        plain[at] = updated(world.optimizer, plain[at], torch.from_numpy(gradients))
    world.flush()
    furthest = max(furthest, float(np.abs(world.holder.read(np.arange(world.rows)) - plain.numpy()).max()))
    assert world.workers[0].lines.pushed["eviction"] > 0
    assert furthest < 1e-4 if updates == "each" else furthest > 0.1


def test_several_trainers_steps_keep_the_sum_of_squares() -> None:
    """Adagrad's state counts every trainer's gradients once, although each made its steps alone."""
    world = World(workers=2, bounds=(9,), optimizer="adagrad")
    for _ in range(3):
        for who in (0, 1):
            world.step(who, np.array([3]), np.full((1, DIM), 1.0 + who, np.float32))
    world.flush()
    assert np.allclose(world.holder.read(np.array([3]))[0, DIM:], 3 * (1 + 4))


def test_bounds_are_per_table() -> None:
    """Each table keeps its own bound, and the looser one uses it."""
    world = World(bounds=(0, 5), slots=40)
    rng = np.random.default_rng(3)
    for _ in range(500):
        first, _ = batch(rng, 30)
        rows = np.concatenate((first, batch(rng, 30)[0] + 30))
        gradients = rng.integers(-3, 4, (len(rows), DIM)).astype(np.float32)
        world.step(int(rng.integers(3)), rows, gradients)
    assert world.stale[:30].max() == 0
    assert 0 < world.stale[30:].max() <= 5


def test_rows_shipped_do_not_grow_with_the_bound() -> None:
    """On one trace."""
    shipped = []
    for bound in (0, 1, 3, 10, 100):
        world = World(bounds=(bound,))
        schedule(world, seed=4)
        shipped.append(world.pulled + world.pushed)
    assert shipped == sorted(shipped, reverse=True)
    assert shipped[-1] < shipped[0]


@pytest.mark.parametrize("slots", [2, 40])
def test_several_updates_of_one_batch_are_all_pushed(slots: int) -> None:
    """Rows with lines go over their bound in the first or in the second; rows without one count both."""
    world = World(workers=1, bounds=(1,), slots=slots)
    rows, one = np.arange(6), np.ones((6, DIM), np.float32)
    push, check = world.start(0, rows)
    world.push([(0, push)])
    world.read(0, check)
    for _ in range(3):
        world.finish(0, rows, one)
    due = world.workers[0].lines.due()
    assert np.array_equal(np.sort(due.rows), rows)
    assert (due.updates == 3).all()
    world.push([(0, due)])
    assert np.array_equal(world.holder.read(rows), -3 * one)
    assert not len(world.workers[0].lines.flush().rows)


def test_no_rows_can_be_left_out_of_updates() -> None:
    tables = HetTables.__new__(HetTables)
    with pytest.raises(UserError, match="which HetTables cannot do: .*a holder applies"):
        tables.filter_updates(None)  # type: ignore[arg-type]
