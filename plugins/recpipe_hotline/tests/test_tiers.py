"""What happens when: fetches behind popular micro-batches, rows in one place, moves without loss."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recpipe_hotline.tests.rig import QUICK, Rig, Setting, difference, train

from recpipe.data.dataset import Dataset
from recpipe.pipeline.batch import InFlight
from recpipe.plugin.store import ColdStore
from recpipe.tables.group_rows import GroupRows
from recpipe.tables.tiers.lookups import CpuLookups
from recpipe.tables.tiers.tiered import TieredRows

STEPS = 40


@contextmanager
def running(dataset: Dataset, setting: Setting, folder: Path) -> Iterator[Rig]:
    rig = Rig(dataset, setting, folder)
    try:
        yield rig
    finally:
        rig.close()


def parted(rows: GroupRows) -> bool:
    """Whether the batch has a popular micro-batch that need not wait for anything."""
    assert rows.plan is not None
    return 0 < rows.cold_first < rows.ids.stride() and not rows.plan.fetches_residents


def on_popular_backward(rig: Rig, then: Callable[[GroupRows], None]) -> None:
    """Call ``then(rows)`` when the gradients of a popular micro-batch are complete."""
    take = rig.model.take

    def watched(batch: InFlight) -> None:
        take(batch)
        (group,) = batch.moving
        leaf = group.leaf

        def watched_leaf(low: int, high: int) -> torch.Tensor:
            rows = leaf(low, high)
            if parted(group) and (low, high) == (0, group.cold_first):
                rows.register_post_accumulate_grad_hook(lambda _: then(group))
            return rows

        group.leaf = watched_leaf  # type: ignore[method-assign]

    rig.model.take = watched  # type: ignore[method-assign]


@pytest.mark.parametrize("store", ["host", "ssd"])
def test_fetches_run_behind_popular_micro_batches(store: str, synthetic: Dataset, tmp_path: Path) -> None:
    """The store delivers only after the popular backward: whoever waits for it earlier is found out."""
    with running(synthetic, Setting(prefetch=False, store=store), tmp_path) as rig:
        popular_done = threading.Event()
        early: list[bool] = []
        advance, gather = rig.tiers.advance, rig.tiers.store.gather

        def gated_gather(rows: Any, out: Any) -> None:
            early.append(not popular_done.wait(timeout=5))
            gather(rows, out)

        def arming_advance(rows: TieredRows) -> None:
            # The gate is shut before the fetch can start: without prefetch, ``advance`` starts it.
            popular_done.clear() if parted(rows) else popular_done.set()
            advance(rows)

        rig.tiers.store.gather = gated_gather  # type: ignore[method-assign]
        rig.tiers.advance = arming_advance  # type: ignore[method-assign]
        overlapped: list[GroupRows] = []

        def open_gate(rows: GroupRows) -> None:
            overlapped.append(rows)
            popular_done.set()

        on_popular_backward(rig, open_gate)
        rig.train(STEPS)
        popular_done.set()
    assert len(overlapped) > STEPS // 3
    assert not any(early), "training waited for cold rows before the popular micro-batch was done"


def test_the_slab_is_read_after_the_popular_backward(synthetic: Dataset, tmp_path: Path) -> None:
    with running(synthetic, Setting(), tmp_path) as rig:
        events: list[str] = []
        wait, compute = rig.tiers.wait, rig.tiers.compute

        def watched_wait() -> None:
            if rig.tiers.now.arriving is not None:
                events.append("wait")
            wait()

        def watched_compute(rows: TieredRows, warm: bool, cold: bool) -> Any:
            if cold:
                events.append("slab")
            return compute(rows, warm, cold)

        rig.tiers.wait = watched_wait  # type: ignore[method-assign]
        rig.tiers.compute = watched_compute  # type: ignore[method-assign]
        on_popular_backward(rig, lambda rows: events.append("popular done"))
        checked = 0
        for staged in rig.staged(STEPS):
            events.clear()
            (rows,) = staged.moving
            assert rows.plan is not None
            rig.update(staged)
            if parted(rows):
                assert events == ["popular done", "wait", "slab"]
                checked += 1
            elif len(rows.plan.slab):
                assert events[0] == "wait"
    assert checked > STEPS // 3


class Ledger:
    """Rows of every gather and scatter of a store."""

    def __init__(self, store: ColdStore) -> None:
        self.read: list[Any] = []
        self.written: list[Any] = []
        gather, scatter = store.gather, store.scatter

        def recorded_gather(rows: Any, out: Any) -> None:
            self.read.append(rows.copy())
            gather(rows, out)

        def recorded_scatter(rows: Any, records: Any) -> None:
            self.written.append(rows.copy())
            scatter(rows, records)

        store.gather = recorded_gather  # type: ignore[method-assign]
        store.scatter = recorded_scatter  # type: ignore[method-assign]


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_cold_row_moves_at_most_once_each_way(prefetch: bool, synthetic: Dataset, tmp_path: Path) -> None:
    with running(synthetic, Setting(prefetch=prefetch), tmp_path) as rig:
        ledger = Ledger(rig.tiers.store)
        needed = 0
        for staged in rig.staged(STEPS):
            needed += sum(len(rows.plan.carried_from) for rows in staged.moving if rows.plan is not None)
            rig.update(staged)
        with rig.tiers.quiesced():
            pass
    assert len(ledger.read) <= STEPS + 1  # and the fetch for the batch that was planned ahead
    assert len(ledger.written) <= STEPS + 1  # and what the last batch left in the slab
    for rows in [*ledger.read, *ledger.written]:
        assert len(np.unique(rows)) == len(rows)
    assert 0 < sum(map(len, ledger.read[:STEPS])) <= needed


def test_a_row_is_in_one_tier(synthetic: Dataset, tmp_path: Path) -> None:
    """Resident and slab are disjoint, the map says which row is where, the store has the rest."""
    with running(synthetic, Setting(), tmp_path) as rig:
        rows_in_all = rig.tables.layout.total_rows
        for staged in rig.staged(STEPS):
            rig.update(staged)
            with rig.tiers.quiesced():
                planner = rig.tiers.planner
                slots = np.flatnonzero(planner.row_of_slot >= 0)
                resident = planner.row_of_slot[slots]
                assert len(np.unique(resident)) == len(resident) <= rig.policy.space.slots
                assert not np.isin(planner.slab_rows, resident).any()
                np.testing.assert_array_equal(planner.where[resident], slots)
                assert (planner.where >= 0).sum() == len(resident)
                assert len(planner.where) == rows_in_all


def test_micro_batches_make_up_the_batch(synthetic: Dataset, tmp_path: Path) -> None:
    """n_popular + n_others = N, and no popular sample has a bag in the slab."""
    with running(synthetic, Setting(), tmp_path) as rig:
        for staged in rig.staged(STEPS):
            (rows,) = staged.moving
            assert isinstance(rows, TieredRows)
            lookups = rows.lookups
            assert isinstance(lookups, CpuLookups)
            sizes = np.diff((0, *staged.bounds))
            assert sizes.sum() == staged.batch.size
            assert (sizes > 0).all()
            assert len(lookups.slab.offsets) - 1 == 26 * (staged.batch.size - rows.cold_first)
            assert len(lookups.resident) + len(lookups.slab) == staged.batch.sparse.values().numel()
            rig.update(staged)


@pytest.mark.parametrize("store", ["host", "ssd"])
def test_migration_moves_weights_and_state_bitwise(store: str, synthetic: Dataset, tmp_path: Path) -> None:
    """Rows go in, out and in again without training: every record stays what it was."""
    restless = {"learn_batches": 1, "growth": 1.0, "relearn_every": 1, "sample": 1.0, "decay": 4}
    with running(synthetic, Setting(knobs=restless, store=store, resident=0.05), tmp_path) as rig:
        generator = np.random.default_rng(5)
        for region in rig.tiers.regions():
            weights, state = rig.tiers.read(region)
            rig.tiers.write(region, (random_like(generator, weights), random_like(generator, state)))
        before = rig.parameters()
        assert all(values.all() for name, values in before.items() if name.endswith(".state"))
        left: set[int] = set()
        back = 0
        for number, batch in zip(range(STEPS), rig.loader.source.dataset.batches("train", 64), strict=False):
            rows = rig.tiers.input_dist(batch.sparse)
            rig.tiers.advance(rows)
            rig.tiers.wait()
            back += len(left & set(rows.plan.placed.tolist()))
            left |= set(rows.plan.evicted[rows.plan.evicted >= 0].tolist())
            if number % 10 == 9:
                assert difference(rig.parameters(), before) == 0.0
    assert back > 0, "no row has made the round trip"


def random_like(generator: np.random.Generator, values: Any) -> Any:
    return generator.random(values.shape, np.float32) + 0.5


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
def test_prefetch_changes_no_bit(optimizer: str, synthetic: Dataset, tmp_path: Path) -> None:
    on = train(synthetic, Setting(optimizer=optimizer), tmp_path / "on", STEPS)[1]
    off = train(synthetic, Setting(optimizer=optimizer, prefetch=False), tmp_path / "off", STEPS)[1]
    assert difference(on, off) == 0.0


def test_the_store_changes_no_bit(synthetic: Dataset, tmp_path: Path) -> None:
    host = train(synthetic, Setting(), tmp_path / "host", STEPS)[1]
    ssd = train(synthetic, Setting(store="ssd"), tmp_path / "ssd", STEPS)[1]
    assert difference(host, ssd) == 0.0


def test_looking_between_batches_changes_no_bit(synthetic: Dataset, tmp_path: Path) -> None:
    """Evaluations and checkpoints undo the plan that is ahead and make it again."""
    undisturbed = train(synthetic, Setting(), tmp_path / "undisturbed", STEPS)[1]
    with running(synthetic, Setting(), tmp_path / "disturbed") as rig:
        for number, staged in enumerate(rig.staged(STEPS)):
            rig.update(staged)
            if number % 3 == 0:
                rig.parameters()
        disturbed = rig.parameters()
    assert difference(undisturbed, disturbed) == 0.0


def test_the_same_run_twice_keeps_the_same_rows(synthetic: Dataset, tmp_path: Path) -> None:
    one, _ = train(synthetic, Setting(knobs=QUICK), tmp_path / "one", STEPS)
    two, _ = train(synthetic, Setting(knobs=QUICK), tmp_path / "two", STEPS)
    np.testing.assert_array_equal(
        one.policy.space.residents.row_of_slot, two.policy.space.residents.row_of_slot
    )
    np.testing.assert_array_equal(one.policy.counts, two.policy.counts)
    assert one.micro == two.micro
