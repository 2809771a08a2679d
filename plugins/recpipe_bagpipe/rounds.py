"""Rounds of write-backs and prefetches with the store, in a thread beside training."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from queue import SimpleQueue
from time import perf_counter

import numpy as np
import torch

from recpipe.kit import HoldersStore
from recpipe.plugin import IoCounters, Records, TierTimes
from recpipe_bagpipe.oracle import Rows


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
