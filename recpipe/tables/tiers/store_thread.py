"""The thread that uses the cold store; it fetches and writes in the order of the requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from time import perf_counter
from typing import Literal, TypeVar

import numpy as np
import torch

from recpipe.common.device import threads_for
from recpipe.distributed.ranks import Ranks
from recpipe.plugin.bags import RowIds
from recpipe.plugin.collection import TierTimes
from recpipe.plugin.store import ColdStore, IoCounters, Records
from recpipe.tables.tiers.transfer import Sent, Transfer

T = TypeVar("T")


class StoreThread:
    """One thread with one queue, so that a fetch sees every write that was queued before it.

    ``counters`` and ``times`` cover training. Evaluation, checkpoints and exports use ``fetch_now`` and
    ``write_now``, which are not counted. If several ranks train, all of them make the same calls with the
    same rows; each writes its share, in rounds in which all take part.
    """

    def __init__(self, store: ColdStore, device: torch.device, times: TierTimes, ranks: Ranks) -> None:
        self.store, self.times, self.ranks = store, times, ranks
        self.counters = IoCounters()
        self.transfer = Transfer.on(device)
        self._thread = threads_for(device, 1, "recpipe-io")
        self._writes: list[Future[None]] = []

    def fetch(self, rows: RowIds) -> Future[Sent]:
        """Queue a fetch of ``rows`` for training: their records, float32 [n, width]."""
        return self._thread.submit(self._counted, "fetch", lambda: self._fetch(rows))

    def write(self, rows: RowIds, records: torch.Tensor, used: Sequence[torch.Tensor] = ()) -> None:
        """Queue a write of ``records`` (float32 [n, width] on the device, not changed later).

        ``used``: tensors made on other streams, whose last use is on the current one. Their memory is not
        given to others before.
        """
        if not len(rows):
            self.transfer.let_go(used)
            return
        mine = self._share(len(rows))
        to_host = self.transfer.to_host(records[mine], used)
        work = self._thread.submit(self._counted, "write", lambda: self.store.scatter(rows[mine], to_host()))
        self._writes.append(work)

    def check_writes(self) -> None:
        """Raise the error of a finished write; wait if more than two writes are in progress."""
        for write in self._writes[:]:
            if len(self._writes) > 2 or write.done():
                write.result()
                self._writes.remove(write)

    def fetch_now(self, rows: RowIds) -> torch.Tensor:
        """Records of ``rows``, float32 [n, width] on the device."""
        return self._thread.submit(self._fetch, rows).result().use()[0]

    def write_now(self, rows: RowIds, records: Records) -> None:
        """Replace the records of ``rows``."""
        mine = self._share(len(rows))
        self._thread.submit(self.store.scatter, rows[mine], np.ascontiguousarray(records[mine])).result()

    def as_stored(self, records: torch.Tensor) -> torch.Tensor:
        """What the store would return of ``records``. Rows that bypass the store are rounded too, so that
        results do not depend on batches planned ahead or on checkpoints."""
        if self.store.rounded is None or not len(records):
            return records
        if records.is_cuda and self.store.rounded_there is not None:
            there = self.store.rounded_there(records)
            if there is not None:
                return there
        return torch.from_numpy(self.store.rounded(records.cpu().numpy())).to(records.device)

    def flush(self) -> None:
        """Wait for all that is queued, and for the store to have it as durably as it can."""
        while self._writes:
            self._writes.pop(0).result()
        self._thread.submit(self.store.flush).result()

    def close(self) -> None:
        """Wait for the queue, close the store in any case, and raise the error of a failed request."""
        try:
            for write in self._writes:
                write.result()
        finally:
            self._thread.shutdown(wait=True)
            self.store.close()

    def _share(self, rows: int) -> slice:
        """Selects those of ``rows`` that this trainer writes."""
        if len(self.ranks.trainers) == 1:
            return slice(0, rows)
        return self.ranks.shares(0, rows)[self.ranks.trainer]

    def _fetch(self, rows: RowIds) -> Sent:
        host = self.transfer.host_buffer(len(rows), self.store.layout.width)
        self.store.gather(rows, host.numpy())
        return self.transfer.to_device(host)

    def _counted(self, kind: Literal["fetch", "write"], work: Callable[[], T]) -> T:
        """Do ``work`` for training: its traffic and seconds count."""
        start, before = perf_counter(), replace(self.store.io)
        done = work()
        self.counters = self.counters.plus(self.store.io.plus(before, -1))
        setattr(self.times, kind, getattr(self.times, kind) + perf_counter() - start)
        return done
