"""Several trainers, as threads: bit for bit the synchronous run, whatever lies between the batches."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from recpipe_bagpipe.replicas import Replicas
from recpipe_bagpipe.steps import lowest
from recpipe_bagpipe.sync import Worker
from recpipe_bagpipe.tests.trainers import (
    FEATURES,
    Bits,
    Plan,
    Trained,
    Trainer,
    in_threads,
    make_threads,
    share_of,
    synchronous,
    zipf_batches,
)

from recpipe.errors import UserError
from recpipe.plugin.batch import Batch
from recpipe.plugin.tables import to_numpy
from recpipe.tables.rows import table_bags

BATCHES = zipf_batches(26)
WINDOWS = [(3, 1), (6, 2), (8, 3), (20, 6), (100, 25)]
OPTIMIZERS = ["sgd", "rowwise_adagrad", "adagrad"]
CASES = [
    pytest.param(
        trainers,
        window,
        optimizer,
        id=f"{trainers}-window{number}-{optimizer}",
        marks=pytest.mark.soak if (trainers + number + kind) % len(OPTIMIZERS) else [],
    )
    for trainers in (1, 2, 3)
    for number, window in enumerate(WINDOWS)
    for kind, optimizer in enumerate(OPTIMIZERS)
]
"""By default each number of trainers meets every window, with one optimizer, and every optimizer."""


def same(one: Bits, two: Bits) -> bool:
    """Whether all bits are equal: -0.0 is not 0.0."""
    return all(np.array_equal(one[name].view(np.int32), two[name].view(np.int32)) for name in one)


def run(plan: Plan, trainers: int) -> list[Trained]:
    return in_threads(make_threads(plan, trainers))


@pytest.mark.parametrize(("trainers", "window", "optimizer"), CASES)
def test_equals_the_synchronous_run(trainers: int, window: tuple[int, int], optimizer: str) -> None:
    plan = Plan(BATCHES, optimizer=optimizer, lookahead=window[0], cleanup=window[1])
    reference = synchronous(plan, trainers)
    for trained in run(plan, trainers):
        assert same(trained.bits, reference)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (2, 3))])
def test_a_gate_one_batch_early_is_noticed(seed: int) -> None:
    plan = Plan(zipf_batches(26, seed=seed), lookahead=6, cleanup=2)
    assert same(run(plan, 3)[0].bits, synchronous(plan, 3))
    early = run(replace(plan, early=1), 3)[0]
    assert not same(early.bits, synchronous(plan, 3))


def test_without_delayed_updates_it_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(BATCHES)
    trainers = make_threads(plan, 2)
    for trainer in trainers:
        monkeypatch.setattr(
            trainer.tables.sync._worker, "submit", lambda job: Worker("none").submit(lambda: None)
        )
    assert not same(in_threads(trainers)[0].bits, synchronous(plan, 2))


@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_shares_differ_in_size_and_may_be_empty(size: int) -> None:
    plan = Plan(zipf_batches(30, size=size))
    reference = synchronous(plan, 3)
    assert all(same(trained.bits, reference) for trained in run(plan, 3))


def test_evaluation_and_reads_change_nothing_and_see_the_last_batch() -> None:
    plan = Plan(BATCHES, look_at=(0, 4, 5, 6, 12, 25))
    trained = run(plan, 3)
    assert all(same(one.bits, synchronous(plan, 3)) for one in trained)
    for which, after in enumerate(plan.look_at):
        records = synchronous(replace(plan, batches=BATCHES[: after + 1]), 3)["tables"]
        for rank, one in enumerate(trained):
            trainer = make_threads(plan, 3)[rank]
            share = share_of(BATCHES[after], trainer.ranks, rank)
            bags = table_bags(plan.tables, share.sparse)
            sums = torch.nn.functional.embedding_bag(
                torch.from_numpy(bags.indices),
                torch.from_numpy(records[:, :8].copy()),
                torch.from_numpy(bags.offsets[:-1]),
                mode="sum",
            )
            expected = to_numpy(sums.view(2, share.size, 8).transpose(0, 1).reshape(share.size, 16))
            assert np.array_equal(one.logits[which], expected), (after, rank)


def test_a_resumed_run_ends_with_the_same_bits() -> None:
    plan = Plan(BATCHES)
    first = make_threads(replace(plan, batches=BATCHES[:11]), 3)
    saved = in_threads(first)[0].bits
    bases = plan.tables.layout.bases

    def resume(trainer: Trainer) -> Trained:
        for region in trainer.tables.regions():
            base = int(bases[[f.name for f in FEATURES].index(region.table)])
            records = saved["tables"][base + region.start : base + region.stop]
            trainer.tables.write(region, (records[:, :8], records[:, 8:]))
        trainer.weights = torch.from_numpy(saved["dense"])
        return trainer.run()

    resumed = in_threads(make_threads(replace(plan, batches=BATCHES[11:]), 3), resume)
    assert all(same(one.bits, synchronous(plan, 3)) for one in resumed)


def test_epochs() -> None:
    plan = Plan(BATCHES, epochs=3)
    assert all(same(one.bits, synchronous(plan, 2)) for one in run(plan, 2))


def test_an_epoch_left_early_is_followed_by_another() -> None:
    plan = Plan(BATCHES)

    def leave(trainer: Trainer) -> Bits:
        trainer.train(_Cut(BATCHES, trainer))
        trainer.train()
        return trainer.bits()

    reference = synchronous(replace(plan, batches=BATCHES[:9] + BATCHES), 2)
    assert all(same(bits, reference) for bits in in_threads(make_threads(plan, 2), leave))


class _Cut(list[Batch]):
    """Batches of which a trainer trains nine: its stream goes on, as does that of a run that stops."""

    def __init__(self, batches: tuple[Batch, ...], trainer: Trainer) -> None:
        super().__init__(batches)
        stream = trainer.tables.stream

        def nine(source: Iterator[Batch]) -> Iterator[Batch]:
            trainer.tables.stream = stream  # type: ignore[method-assign]
            return (batch for _, batch in zip(range(9), stream(source), strict=False))

        trainer.tables.stream = nine  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "slots", [40, 90, *(pytest.param(slots, marks=pytest.mark.soak) for slots in (50, 140))]
)
def test_a_tight_budget_is_kept(slots: int) -> None:
    plan = Plan(BATCHES, lookahead=12, cleanup=2, slots=slots)
    trainers = make_threads(plan, 2)
    trained = in_threads(trainers)
    assert all(same(one.bits, synchronous(plan, 2)) for one in trained)
    assert all(len(trainer.tables.replica.records) == slots for trainer in trainers)
    # The window may be so short that the next batch is not in it: its rows are critical all the same.
    for one in trained:
        for step, *following in zip(one.steps, *(other.steps[1:] for other in trained), strict=False):
            assert not np.isin(step.delayed.held, np.concatenate([next_.mine for next_ in following])).any()


def test_every_expiry_is_written_once_and_only_users_fetch() -> None:
    trainers = make_threads(Plan(BATCHES), 3)
    trained = in_threads(trainers)
    expired = sum(step.cleanup.rows for step in trained[0].steps)
    assert sum(one.io.rows_written for one in trained) == expired > 0
    assert sum(one.io.rows_read for one in trained) == trained[0].figures["rows_fetched"]
    for one in trained:
        for at, step in enumerate(one.steps):
            later = np.concatenate([other.mine for other in one.steps[at : at + 9]])
            assert np.isin(step.fetch, later).all(), "a trainer fetches a row that it does not use"
            assert not set(step.cleanup.write.tolist()) - set(step.cleanup.free.tolist())


def test_a_hit_is_a_lookup_whose_row_some_trainer_held_before_the_batch() -> None:
    trainers = make_threads(Plan(BATCHES), 3)
    trained = in_threads(trainers)
    held: set[int] = set()
    lookups, hits = [0, 0, 0], [0, 0, 0]
    for batch, *steps in zip(BATCHES, *(one.steps for one in trained), strict=True):
        held -= {row for step in steps for row in step.cleanup.free.tolist()}
        shares = [share.tolist() for share in trainers[0].tables._lookups(batch)]
        lookups = [sum_ + len(share) for sum_, share in zip(lookups, shares, strict=True)]
        hits = [sum_ + sum(row in held for row in share) for sum_, share in zip(hits, shares, strict=True)]
        held |= {row for share in shares for row in share}
    counted = [trainer.tables.tier_figures() for trainer in trainers]
    assert [figures.lookups for figures in counted] == lookups
    assert [figures.hits for figures in counted] == hits
    assert 0 < sum(hits) < sum(lookups)


def test_messages_are_skipped_where_nobody_has_anything_to_send() -> None:
    """Trainer 0 sees rows of one table, trainer 1 of the other."""
    batch = zipf_batches(1, size=2, lengths=(1, 1))[0]
    lengths = torch.tensor([1, 0, 0, 1])
    sparse = type(batch.sparse)(["a", "b"], torch.tensor([7, 3]), lengths=lengths)
    plan = Plan((Batch(batch.dense, sparse, batch.labels),) * 9)
    for one in run(plan, 2):
        assert same(one.bits, synchronous(plan, 2))
        assert one.figures["messages"] == 0
        assert one.figures["local_rows"] == 18
        assert one.figures["rows_fetched"] == 2


def test_batches_that_a_plugin_changed_are_refused() -> None:
    def change(trainer: Trainer) -> None:
        for batch, other in zip(trainer.tables.stream(iter(BATCHES)), BATCHES[1:], strict=False):
            assert batch is not other
            trainer.tables(share_of(other, trainer.ranks, trainer.ranks.trainer).sparse)

    with pytest.raises(UserError, match="drop the plugin that changes them"):
        in_threads(make_threads(Plan(BATCHES), 2), change)


def test_a_fault_of_the_data_reaches_training() -> None:
    def broken() -> Iterator[Batch]:
        yield from BATCHES[:5]
        raise OSError("no more data")

    def train(trainer: Trainer) -> None:
        trainer.train(broken())  # type: ignore[arg-type]

    with pytest.raises(OSError, match="no more data"):
        in_threads(make_threads(Plan(BATCHES), 2), train)


def test_a_lost_peer_reaches_training_and_close_returns() -> None:
    noticed = []

    def killed(batch: Batch) -> None:
        raise ConnectionError("killed")

    def train(trainer: Trainer) -> None:
        if trainer.ranks.trainer:
            trainer.look = killed  # type: ignore[method-assign]
            trainer.train()
        with pytest.raises(threading.BrokenBarrierError):
            trainer.train()
        with pytest.raises(threading.BrokenBarrierError):
            trainer.tables.close()
        noticed.append(trainer.ranks.trainer)

    with pytest.raises(ConnectionError, match="killed"):
        in_threads(make_threads(Plan(BATCHES, look_at=(6,)), 2), train)
    assert noticed == [0]


def test_the_lowest_of_a_set() -> None:
    masks = np.array([1, 2, 4, 6, 7, 0], np.uint64)
    assert lowest(masks, 3).tolist() == [0, 1, 2, 1, 0, 3]


def test_a_worker_runs_nothing_after_a_fault() -> None:
    worker, ran = Worker("test"), []

    def fail() -> None:
        raise ValueError("first")

    assert worker.submit(lambda: ran.append(1)).result() is None
    with pytest.raises(ValueError, match="first"):
        worker.submit(fail).result()
    with pytest.raises(ValueError, match="first"):
        worker.submit(lambda: ran.append(2)).result()
    with pytest.raises(ValueError, match="first"):
        worker.check()
    assert ran == [1]
    worker.close()


def test_no_rows_can_be_left_out_of_updates() -> None:
    tables = Replicas.__new__(Replicas)
    with pytest.raises(UserError, match="which Replicas cannot do: .*update some rows of a batch while"):
        tables.filter_updates(None)  # type: ignore[arg-type]
