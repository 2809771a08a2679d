"""One trainer's replicas of rows, and what keeps them equal: gradients are sent to a row's holders, records
to its new holders, and rounds with the store write rows back and fetch others, in a thread beside
training."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from queue import SimpleQueue
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.kit import Channel, HoldersStore, updated
from recpipe.plugin import IoCounters, Records, TableOptimizer, TierTimes
from recpipe_bagpipe.oracle import Rows
from recpipe_bagpipe.steps import HandoverPart, Step, Sync


class Worker:
    """One daemon thread and its queue.

    A job may be a collective that a lost peer never enters. An executor's thread would then keep the process
    from ending, and the other ranks from noticing. After a job that failed, later ones are not run but raise
    the same error.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = SimpleQueue()
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> Future[None]:
        """Queue ``job``; the result is None or its error."""
        done: Future[None] = Future()
        self._jobs.put((job, done))
        return done

    def check(self) -> None:
        """Raise a job's error, if one failed."""
        if self._fault is not None:
            raise self._fault

    def close(self) -> None:
        """Let the thread end after its queue, without waiting for it."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (queued := self._jobs.get()) is not None:
            job, done = queued
            try:
                self.check()
                job()
            except BaseException as fault:
                self._fault = fault
                done.set_exception(fault)
            else:
                done.set_result(None)


class Rounds:
    """The store's rounds, one after the other, in the order in which the trainers ask for them. Every trainer
    enters each; what all of them write comes before what they read."""

    def __init__(self, store: HoldersStore, times: TierTimes) -> None:
        self.store = store
        self.times = times
        self.counters = IoCounters()
        """What training moved, without evaluation and checkpoints."""
        self._worker = Worker("recpipe-io")

    def start(self, write: Rows, records: torch.Tensor, read: Rows, into: Records) -> Future[None]:
        """Queue a round of training: ``read`` lands in ``into``."""

        def job() -> None:
            began = perf_counter()
            before = replace(self.store.io)
            self.store.exchange_rows(write, records.numpy(), read, into)
            self.counters = self.counters.plus(self.store.io.plus(before, -1))
            if len(read):
                self.times.fetch += perf_counter() - began
            else:
                self.times.write += perf_counter() - began

        return self._worker.submit(job)

    def now(self, write: Rows, records: torch.Tensor, read: Rows) -> Records:
        """A round for evaluation or a checkpoint, after all that is queued; returns the records of
        ``read``."""
        out = np.empty((len(read), self.store.layout.width), np.float32)
        self._worker.submit(lambda: self.store.exchange_rows(write, records.numpy(), read, out)).result()
        return out

    def check(self) -> None:
        """Raise a round's error, if there was one."""
        self._worker.check()

    def close(self) -> None:
        """Close the store after all that is queued. If a round has failed, raise its error without
        waiting."""
        try:
            self._worker.submit(self.store.close).result()
        finally:
            self._worker.close()


NOWHERE = -1
"""The ``slot_of`` a row without a slot."""


class Replica:
    """``slots`` records float32 [slots, width] of any tables' rows. Only the training thread changes them,
    except for records of delayed rows, which are not used meanwhile."""

    def __init__(self, slots: int, rows: int, width: int) -> None:
        # Not zeroed, so that memory of slots that are never used is never touched.
        self.records = torch.empty((slots, width))
        self._slot_of = np.full(rows, NOWHERE, np.int32)
        self._row_of = np.full(slots, -1, np.int64)
        self._dirty = np.zeros(slots, bool)
        self._writes = np.zeros(slots, bool)
        self._free = np.arange(slots, dtype=np.int64)[::-1].copy()
        self._free_count = slots

    def put(self, rows: Rows, records: torch.Tensor) -> None:
        """Put ``rows``, which have no slots yet, and their ``records`` (float32 [n, width]) into slots."""
        left = self._free_count - len(rows)
        if left < 0:
            raise RuntimeError(
                f"bagpipe: the oracle plans {len(rows)} more rows, but {self._free_count} of "
                f"{len(self._free)} slots are free"
            )
        slots = self._free[left : self._free_count].copy()
        self._free_count = left
        self._slot_of[rows] = slots
        self._row_of[slots] = rows
        self.records[torch.from_numpy(slots)] = records

    def slots(self, rows: Rows) -> torch.Tensor:
        """The slots of ``rows``, int64 [n]; all must have one."""
        found = self._slot_of[rows].astype(np.int64)
        missing = int((found < 0).sum())
        if missing:
            raise RuntimeError(f"bagpipe: {missing} of {len(rows)} rows are not resident when needed")
        return torch.from_numpy(found)

    def take(self, rows: Rows) -> torch.Tensor:
        """A copy of the records of ``rows``, float32 [n, width]."""
        return self.records[self.slots(rows)]

    def release(self, rows: Rows) -> None:
        """Free the slots of ``rows``."""
        slots = self.slots(rows).numpy()
        self._slot_of[rows] = NOWHERE
        self._row_of[slots] = -1
        self._dirty[slots] = False
        self._free[self._free_count : self._free_count + len(slots)] = slots
        self._free_count += len(slots)

    def mark(self, rows: Rows, writes: NDArray[np.bool_]) -> None:
        """Note that ``rows`` change in this batch; ``writes``: whether this trainer will write them."""
        slots = self.slots(rows).numpy()
        self._dirty[slots] = True
        self._writes[slots] = writes

    def flushed(self) -> Rows:
        """The changed rows that this trainer has to write, sorted; none is marked as changed afterwards."""
        rows = np.sort(self._row_of[self._dirty & self._writes])
        self._dirty.fill(False)
        return rows

    def clear(self) -> None:
        """Forget all rows."""
        self._slot_of.fill(NOWHERE)
        self._row_of.fill(-1)
        self._dirty.fill(False)
        self._free = np.arange(len(self._free), dtype=np.int64)[::-1].copy()
        self._free_count = len(self._free)

    @property
    def overhead_bytes(self) -> int:
        """Memory beyond the records."""
        maps = (self._slot_of, self._row_of, self._dirty, self._writes, self._free)
        return sum(part.nbytes for part in maps)


@dataclass
class SyncFigures:
    """What all trainers together sent to each other. ``messages`` counts only those of this trainer. Rows of
    gradients count once for each batch, copies once for each receiver."""

    local_rows: int = 0
    critical_rows: int = 0
    critical_bytes: int = 0
    delayed_rows: int = 0
    delayed_bytes: int = 0
    handover_rows: int = 0
    handover_bytes: int = 0
    messages: int = 0


class RowSync:
    """Updates of one trainer's replicas. The channel ``now`` carries what the next batch waits for, ``later``
    the rest."""

    def __init__(
        self, replica: Replica, optimizer: TableOptimizer, dim: int, now: Channel, later: Channel
    ) -> None:
        self.replica = replica
        self.optimizer = optimizer
        self.dim = dim
        self.figures = SyncFigures()
        self._now, self._later = now, later
        self._several = now.size > 1
        self._worker = Worker("recpipe-delayed")
        self._pending: list[tuple[int, Future[None]]] = []

    def hand_over(self, handover: HandoverPart) -> None:
        """Send records from their lowest holder to new holders, before the batch that needs them."""
        if not handover.copies:
            return
        received = np.concatenate(handover.receive)
        parts = [self.replica.take(rows).numpy() for rows in handover.send]
        came = self._now.exchange(parts, [len(rows) for rows in handover.receive])
        self.replica.put(received, torch.from_numpy(np.concatenate(came)))
        figures = self.figures
        figures.messages += 1
        figures.handover_rows += handover.copies
        figures.handover_bytes += handover.copies * self.replica.records.shape[1] * 4

    def update(self, step: Step, gradients: torch.Tensor) -> None:
        """Make one optimizer step for all rows of a batch; ``gradients`` (float32 [U, D]) are those of
        ``step.mine``. Delayed rows are updated in the background: see ``join``."""
        self.replica.mark(step.held, step.writes)
        if step.delayed.rows:
            work = self._summing(step.delayed, gradients, self._later)
            self._pending.append((step.number, self._worker.submit(work)))
        own = gradients[torch.from_numpy(step.local_at)]
        # The other trainers would have added 0.0, which turns -0.0 into 0.0.
        self._apply(
            self.replica.slots(step.local),
            own + 0.0 if self._several else own,
            self.optimizer.rate.value,
            self.optimizer.clock.points,
        )
        if step.critical.rows:
            self._summing(step.critical, gradients, self._now)()
        figures, size = self.figures, self.dim * 4
        figures.local_rows += step.local_rows
        figures.critical_rows += step.critical.rows
        figures.critical_bytes += step.critical.copies * size
        figures.delayed_rows += step.delayed.rows
        figures.delayed_bytes += step.delayed.copies * size
        figures.messages += bool(step.critical.rows) + bool(step.delayed.rows)

    def join(self, last: int | None = None) -> None:
        """Return once the delayed updates of batches up to ``last`` (None: all) have been made."""
        while self._pending and (last is None or self._pending[0][0] <= last):
            self._pending.pop(0)[1].result()

    def close(self) -> None:
        """End the background thread."""
        self._worker.close()

    def _summing(self, sync: Sync, gradients: torch.Tensor, channel: Channel) -> Callable[[], None]:
        """The work that exchanges and adds the rows' gradients and updates the rows held here."""
        parts = [gradients[torch.from_numpy(at)].numpy() for at in sync.send]
        own = gradients[torch.from_numpy(sync.own)].numpy()
        slots = self.replica.slots(sync.held)
        # Delayed rows are updated while the next step trains, whose rate may be another.
        here, rate, points = channel.index, self.optimizer.rate.value, self.optimizer.clock.points

        def work() -> None:
            sizes = [0 if t == here else len(used) for t, used in enumerate(sync.used)]
            came = channel.exchange(parts, sizes)
            came[here] = own
            # In the order of the trainers; one that does not use a row adds zero, as in core.
            total = torch.zeros((len(sync.held), self.dim))
            for trainer, (used, part) in enumerate(zip(sync.used, came, strict=True)):
                addend = torch.zeros_like(total)
                addend[torch.from_numpy(used)] = torch.from_numpy(part)
                total = total + addend if trainer else addend
            self._apply(slots, total, rate, points)

        return work

    def _apply(
        self, slots: torch.Tensor, gradients: torch.Tensor, rate: float, points: tuple[int, int]
    ) -> None:
        records = self.replica.records
        records[slots] = updated(self.optimizer, records[slots], gradients, rate, points)
