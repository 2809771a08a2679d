"""Several trainers of a small model: as processes, as threads, and simulated one after the other."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from recpipe_bagpipe.replicas import Replicas
from recpipe_bagpipe.steps import Step
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.data.select import select
from recpipe.distributed.ranks import Channel, Emulation, PeerLost, Ranks
from recpipe.plugin.batch import Batch
from recpipe.plugin.collection import TierParts
from recpipe.plugin.store import IoCounters
from recpipe.plugin.tables import SparseFeature, TableOptimizer, TableSet
from recpipe.tables.rows import RowBags, table_bags, updated
from recpipe.tables.stores.holders import HoldersStore
from recpipe.tables.stores.local import HostStore
from tests.placing import inputs_of
from tests.ranks import joined

Bits = dict[str, NDArray[np.float32]]
CPU = torch.device("cpu")
DIM = 8
FEATURES = (SparseFeature("a", 300), SparseFeature("b", 40))


@dataclass(frozen=True)
class Plan:
    """What a run is made of."""

    batches: tuple[Batch, ...]
    features: tuple[SparseFeature, ...] = FEATURES
    optimizer: str = "rowwise_adagrad"
    lookahead: int = 8
    cleanup: int = 3
    slots: int = 10_000
    early: int = 0
    epochs: int = 1
    look_at: tuple[int, ...] = ()
    """Batches after which the trainers evaluate and read a table."""

    @property
    def tables(self) -> TableSet:
        return TableSet.one_each(self.features, DIM, TableOptimizer(self.optimizer, 0.1), seed=5)


def zipf_batches(
    count: int, size: int = 12, seed: int = 1, lengths: tuple[int, int] = (0, 3)
) -> tuple[Batch, ...]:
    """Batches over ``FEATURES``, several ids per bag or none, skewed towards 0."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        counts = rng.integers(lengths[0], lengths[1] + 1, 2 * size)
        rows = np.repeat([f.rows for f in FEATURES], [counts[:size].sum(), counts[size:].sum()])
        ids = (rng.random(counts.sum()) ** 3 * rows).astype(np.int64)
        sparse = KeyedJaggedTensor(["a", "b"], torch.from_numpy(ids), lengths=torch.from_numpy(counts))
        dense = torch.from_numpy(rng.standard_normal((size, 3)).astype(np.float32))
        made.append(Batch(dense, sparse, torch.from_numpy((rng.random(size) < 0.4).astype(np.float32))))
    return tuple(made)


# -- the model: logits are linear in dense features and pooled rows ----------------------------


def first_weights(plan: Plan) -> torch.Tensor:
    width = plan.batches[0].dense.shape[1] + DIM * len(plan.features)
    return torch.linspace(-1, 1, width)


def gradients(
    weights: torch.Tensor, share: Batch, pooled: torch.Tensor, total: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Backward of a share's part of the batch's mean loss; (dense gradient, logits)."""
    weights = weights.clone().requires_grad_()
    if share.size:
        logits = torch.cat((share.dense, pooled), dim=1) @ weights
        loss = binary_cross_entropy_with_logits(logits, share.labels, reduction="sum") / total
    else:
        logits = pooled.new_zeros(0)
        loss = pooled.sum()
    loss.backward()
    return torch.zeros_like(weights) if weights.grad is None else weights.grad, logits.detach()


def share_of(batch: Batch, ranks: Ranks, trainer: int) -> Batch:
    part = ranks.shares(0, batch.size)[trainer]
    return select(batch, np.arange(part.start, part.stop))


def synchronous(plan: Plan, trainers: int) -> Bits:
    """The reference: one table, no cache; partial gradients added in the order of the trainers."""
    tables, ranks = plan.tables, Ranks(0, trainers, tuple(range(trainers)), (0,))
    records = torch.from_numpy(np.concatenate([tables.fill(f.name, 0, f.rows) for f in plan.features]))
    weights = first_weights(plan)
    for batch in plan.batches * plan.epochs:
        touched = np.unique(table_bags(tables, batch.sparse).indices)
        dense, sparse = [], []
        for trainer in range(trainers):
            share = share_of(batch, ranks, trainer)
            bags = RowBags.of(table_bags(tables, share.sparse))
            rows = records[torch.from_numpy(bags.distinct)][:, :DIM].contiguous()
            pooled = bags.pooled(rows).requires_grad_()
            dense.append(gradients(weights, share, pooled, batch.size)[0])
            partial = torch.zeros((len(touched), DIM))
            at = torch.from_numpy(np.searchsorted(touched, bags.distinct))
            if share.size:
                assert pooled.grad is not None
                partial[at] = bags.gradients(pooled.grad, DIM)
            sparse.append(partial)
        slots = torch.from_numpy(touched)
        records[slots] = updated(tables.optimizer, records[slots], in_order(sparse))
        weights = weights - 0.1 * in_order(dense)
    return {"tables": records.numpy(), "dense": weights.numpy()}


def in_order(addends: Sequence[torch.Tensor]) -> torch.Tensor:
    total = addends[0].clone()
    for addend in addends[1:]:
        total += addend
    return total


# -- one trainer ---------------------------------------------------------------------------------


@dataclass
class Trained:
    """What a trainer ended with."""

    bits: Bits
    figures: dict[str, int]
    steps: list[Step]
    io: IoCounters
    logits: list[NDArray[np.float32]]
    """Of every evaluation."""


class Trainer:
    """The loop of one trainer; ``sums`` adds up dense gradients."""

    def __init__(
        self, plan: Plan, ranks: Ranks, store: Any, channels: tuple[Channel, Channel, Channel]
    ) -> None:
        self.plan, self.ranks, self.sums = plan, ranks, channels[2]
        inputs = inputs_of(plan.tables)
        parts = TierParts(
            plan.tables, plan.slots, store, CPU, True, ranks, lambda batch: inputs.bags(batch, 0)
        )
        window = {"lookahead": plan.lookahead, "cleanup": plan.cleanup}
        self.tables = Replicas(parts, store, channels[:2], **window, early=plan.early)
        self.steps: list[Step] = []
        self.logits: list[NDArray[np.float32]] = []
        self.weights = first_weights(plan)
        begin = self.tables._begin

        def recorded() -> Step:
            self.steps.append(begin())
            return self.steps[-1]

        self.tables._begin = recorded  # type: ignore[method-assign]

    def train(self, batches: Sequence[Batch] | None = None) -> None:
        """One epoch."""
        chosen = self.plan.batches if batches is None else batches
        for number, batch in enumerate(self.tables.stream(iter(chosen))):
            share = share_of(batch, self.ranks, self.ranks.trainer)
            pooled = self.tables(share.sparse).values()
            dense, _ = gradients(self.weights, share, pooled, batch.size)
            self.weights = self.weights - 0.1 * self.sums.ordered_sum(dense)
            if number in self.plan.look_at:
                self.look(batch)

    def look(self, batch: Batch) -> None:
        with torch.no_grad():
            share = share_of(batch, self.ranks, self.ranks.trainer)
            self.logits.append(self.tables(share.sparse).values().numpy().copy())
        self.tables.read(next(self.tables.regions()))

    def bits(self) -> Bits:
        regions = [np.concatenate(self.tables.read(region), axis=1) for region in self.tables.regions()]
        return {"tables": np.concatenate(regions), "dense": self.weights.numpy()}

    def run(self) -> Trained:
        for _ in range(self.plan.epochs):
            self.train()
        trained = Trained(
            self.bits(), self.tables.figures(), self.steps, replace(self.tables.rounds.counters), self.logits
        )
        self.tables.close()
        return trained


# -- threads as ranks ----------------------------------------------------------------------------


class Meeting:
    """Where threads exchange what they brought."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=30)
        self.brought: list[Any] = [None] * size

    def swap(self, index: int, thing: Any) -> list[Any]:
        self.brought[index] = thing
        self.barrier.wait()
        all_of_it = list(self.brought)
        self.barrier.wait()
        return all_of_it


class ThreadChannel(Channel):
    """A channel between threads."""

    def __init__(self, meeting: Meeting, index: int) -> None:
        members = tuple(range(len(meeting.brought)))
        super().__init__(members, index, None, Emulation())
        self.meeting = meeting

    def exchange(self, parts: Sequence[Any], sizes: Sequence[int] | None = None) -> list[Any]:
        assert len(parts) == self.size
        came = [list(sent)[self.index] for sent in self.meeting.swap(self.index, [p.copy() for p in parts])]
        assert sizes is None or [len(part) for part in came] == list(sizes)
        self.traffic.messages += 1
        return came

    def ordered_sum(self, values: torch.Tensor) -> torch.Tensor:
        return in_order(self.meeting.swap(self.index, values.clone()))


class ThreadStore:
    """The store of all threads: rounds as ``HoldersStore`` has them, on one matrix."""

    direct: bool | None = None

    def __init__(self, tables: TableSet, meeting: Meeting, index: int, records: NDArray[np.float32]) -> None:
        self.layout = tables.layout
        self.io = IoCounters()
        self.meeting, self.index, self.records = meeting, index, records
        self.written: list[NDArray[np.int64]] = []

    def exchange_rows(self, write: Any, records: Any, read: Any, out: Any) -> None:
        self.meeting.swap(self.index, None)
        self.records[write] = records
        self.meeting.swap(self.index, None)
        out[:] = self.records[read]
        self.meeting.swap(self.index, None)
        self.io.rows_read += len(read)
        self.io.rows_written += len(write)
        self.written.append(write)

    def close(self) -> None: ...

    cold_bytes = 0
    overhead_bytes = 0


def make_threads(plan: Plan, trainers: int) -> list[Trainer]:
    """One trainer for each thread."""
    meetings = [Meeting(trainers) for _ in range(4)]
    records = np.concatenate([plan.tables.fill(f.name, 0, f.rows) for f in plan.features])
    made = []
    for index in range(trainers):
        ranks = Ranks(index, trainers, tuple(range(trainers)), tuple(range(trainers)))
        store = ThreadStore(plan.tables, meetings[0], index, records)
        now, later, sums = (ThreadChannel(meeting, index) for meeting in meetings[1:])
        made.append(Trainer(plan, ranks, store, (now, later, sums)))
    return made


def in_threads(trainers: Sequence[Trainer], work: Callable[[Trainer], Any] = Trainer.run) -> list[Any]:
    """``work`` of all trainers at the same time; raises the first thing that one raised."""
    results: list[Any] = [None] * len(trainers)
    faults: list[BaseException] = []

    def body(index: int) -> None:
        try:
            results[index] = work(trainers[index])
        except BaseException as fault:
            faults.append(fault)
            for trainer in trainers:
                for meeting in (trainer.sums.meeting, trainer.tables.rounds.store.meeting):  # type: ignore[attr-defined]
                    meeting.barrier.abort()
                for channel in (trainer.tables.sync._now, trainer.tables.sync._later):
                    channel.meeting.barrier.abort()  # type: ignore[attr-defined]

    threads = [threading.Thread(target=body, args=(index,), daemon=True) for index in range(len(trainers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]
    return results


# -- processes -----------------------------------------------------------------------------------


def process(
    rank: int,
    world: int,
    folder: str,
    trainers: tuple[int, ...],
    holders: tuple[int, ...],
    plans: Sequence[Plan],
) -> None:
    """One rank over gloo, one run after the other; leaves its bits in ``folder``."""
    with joined(rank, world, str(Path(folder) / "meet")):
        for number, plan in enumerate(plans):
            ranks = Ranks(rank, world, trainers, holders)
            now, later, sums = (ranks.channel(trainers) for _ in range(3))
            store = HoldersStore(plan.tables.layout, plan.tables.fill, ranks, HostStore)
            if not ranks.trains:
                store.serve()
                continue
            trained = Trainer(plan, ranks, store, (now, later, sums)).run()
            np.savez(Path(folder) / f"run{number}-rank{rank}.npz", **trained.bits)


def leaves(rank: int, world: int, folder: str, leaver: int) -> None:
    """Trainers 0 and 1, holder 2; ``leaver`` dies on the way. The others note what they saw."""
    plan = Plan(zipf_batches(200), lookahead=7, cleanup=2)
    with joined(rank, world, str(Path(folder) / "meet")):
        ranks = Ranks(rank, world, (0, 1), (2,))
        now, later, sums = (ranks.channel((0, 1)) for _ in range(3))
        store = HoldersStore(plan.tables.layout, plan.tables.fill, ranks, HostStore)
        rounds = []
        one_round = store._round

        def dying(*args: Any, **kwargs: Any) -> bool:
            rounds.append(args)
            if rank == leaver and len(rounds) == 12:
                os._exit(3)
            return one_round(*args, **kwargs)

        store._round = dying  # type: ignore[method-assign]
        try:
            if ranks.trains:
                Trainer(plan, ranks, store, (now, later, sums)).run()
            else:
                store.serve()
        except PeerLost as fault:
            (Path(folder) / f"rank{rank}.txt").write_text(str(fault))
        os._exit(0)
