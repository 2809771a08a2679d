"""Rounds of write-backs and prefetches with the store, in a thread beside training."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import fields, replace
from time import perf_counter
from typing import Protocol

import numpy as np
import torch

from recpipe.plugin import IoCounters, Records, StoreLayout, TierTimes
from recpipe_bagpipe.steps import Rows
from recpipe_bagpipe.worker import Worker


class RoundStore(Protocol):
    """What ``HoldersStore`` offers: rounds that every trainer enters, writes of all before reads of all."""

    layout: StoreLayout
    io: IoCounters
    direct: bool | None

    def exchange_rows(self, write: Rows, records: Records, read: Rows, out: Records) -> None:
        """Write ``records`` of ``write``, then read ``read`` into ``out``."""

    def close(self) -> None:
        """End the rounds."""

    @property
    def cold_bytes(self) -> int:
        """Bytes of the records."""

    @property
    def overhead_bytes(self) -> int:
        """Bytes of memory beside the records."""


class Rounds:
    """The store's rounds, one after the other, in the order in which the trainers ask for them."""

    def __init__(self, store: RoundStore, times: TierTimes) -> None:
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
            for field in fields(IoCounters):
                gained = getattr(self.store.io, field.name) - getattr(before, field.name)
                setattr(self.counters, field.name, getattr(self.counters, field.name) + gained)
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
