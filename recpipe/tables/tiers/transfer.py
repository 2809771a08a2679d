"""Moves records and indices between the device and host memory without stopping the device.

On a CPU both are the same memory and nothing is copied. On a GPU, everything passes through page-locked
buffers, on streams of its own: records to the device, records to the host, and indices, which need not wait
behind records. torch keeps a page-locked buffer until the copy out of it is done, so that it may be dropped
at once. ``StoreThread`` is the thread that uses the cold store, in the order of the requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import accumulate
from time import perf_counter
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.common.device import Aside, arrived, current_stream, threads_for
from recpipe.common.loops import LEAST_COPIED, Spread
from recpipe.distributed.ranks import Ranks
from recpipe.plugin.bags import RowIds
from recpipe.plugin.collection import TierTimes
from recpipe.plugin.store import ColdStore, IoCounters, Records

Positions = NDArray[np.integer[Any]]
ALIGNED = 16
"""Arrays that are copied together begin at multiples of so many bytes."""


@dataclass
class Sent:
    """Tensors on their way to the device in one copy."""

    tensors: list[torch.Tensor]
    ready: torch.cuda.Event | None

    def use(self, kept: bool = False) -> list[torch.Tensor]:
        """The tensors; the current stream waits, the first time, until they have arrived. ``kept``: the
        caller keeps one of them until the stream has passed their last use."""
        if self.ready is not None:
            ready, self.ready = self.ready, None
            arrived(ready, () if kept else self.tensors[:1])  # the others lie in the same memory
        return self.tensors


class Transfer:
    """Moves records and indices for one device; from any thread."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        self._records, self._back, self._indices = Aside(device), Aside(device), Aside(device)

    def host_buffer(self, rows: int, width: int) -> torch.Tensor:
        """Uninitialised float32 [rows, width] in host memory, page-locked for a GPU."""
        return torch.empty((rows, width), dtype=torch.float32, pin_memory=self.on_gpu)

    def to_device(self, host: torch.Tensor) -> Sent:
        """Start the copy of records; called from the I/O thread."""
        if not self.on_gpu:
            return Sent([host], None)
        with self._records.stream():
            records = host.to(self.device, non_blocking=True)
        return Sent([records], self._records.mark())

    def to_host(self, records: torch.Tensor, used: Sequence[torch.Tensor] = ()) -> Callable[[], Records]:
        """What copies ``records``, which are not changed later, once they are made, and waits for the copy.
        The I/O thread calls it, which has less to do than this one. ``used``: tensors whose last use is on
        the current stream; they are kept until then."""
        if not self.on_gpu:
            return records.numpy
        kept = list(used)
        made = torch.cuda.Event()  # type: ignore[no-untyped-call]
        made.record(current_stream())

        def landed() -> Records:
            host = self.host_buffer(*records.shape)
            with self._back.stream():
                arrived(made, ())
                host.copy_(records, non_blocking=True)
            copied = self._back.mark()
            assert copied is not None, "on a GPU"
            copied.synchronize()
            kept.clear()  # only now may their memory, and that of the records, be given to others
            array: Records = host.numpy()
            return array

        return landed

    def let_go(self, used: Sequence[torch.Tensor]) -> None:
        """Drop tensors whose last use is on the current stream, and which were made on others: torch's
        allocator is told which stream has used them."""
        if self.on_gpu:
            for tensor in used:
                tensor.record_stream(current_stream())

    def to_host_now(self, values: torch.Tensor) -> NDArray[Any]:
        """``values``, which are made on the current stream; waits for them."""
        if not self.on_gpu:
            return values.numpy()
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(current_stream())
        copied.synchronize()
        return host.numpy()

    def send(self, *positions: Positions) -> Sent:
        """Start to copy ``positions`` ([n] each) to the device, all in one copy; they arrive as int64. On a
        CPU the tensors share the memory of arrays that are int64 already."""
        if not self.on_gpu:
            return Sent(self.positions_now(*positions), None)
        with self._indices.stream():
            tensors = self.positions_now(*positions)
        return Sent(tensors, self._indices.mark())

    def positions_now(self, *positions: Positions) -> list[torch.Tensor]:
        """A tensor for each of ``positions``, int64, copied on the current stream."""
        if not self.on_gpu:
            return [torch.from_numpy(each.astype(np.int64, copy=False)) for each in positions]
        sizes = [len(each) for each in positions]
        host = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=True)
        np.concatenate(positions, out=host.numpy())
        there = host.to(self.device, non_blocking=True)
        return [there] if len(sizes) == 1 else list(there.split(sizes))  # type: ignore[no-untyped-call]

    def arrays_now(self, arrays: Sequence[NDArray[Any]], spread: Spread) -> list[torch.Tensor]:
        """Copy ``arrays`` of any type to the device on the current stream, all in one copy. ``spread``:
        threads that put them into the page-locked buffer."""
        if not self.on_gpu:
            return [torch.from_numpy(array) for array in arrays]
        if len(arrays) == 1:  # it needs no views, each of which would let go of Python's lock
            (array,) = arrays
            host = torch.empty(array.shape, dtype=torch.from_numpy(array[:0]).dtype, pin_memory=True)
            _stage(array.reshape(-1), host.numpy().reshape(-1), spread)
            return [host.to(self.device, non_blocking=True)]
        sizes = [array.nbytes for array in arrays]
        starts = list(accumulate((-(-size // ALIGNED) * ALIGNED for size in sizes), initial=0))
        host = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
        whole = host.numpy()
        staged = [
            whole[start : start + size].view(array.dtype)
            for array, start, size in zip(arrays, starts, sizes, strict=False)
        ]
        for array, target in zip(arrays, staged, strict=True):
            _stage(array.reshape(-1), target, spread)
        there = host.to(self.device, non_blocking=True)
        return [
            there[start : start + size].view(torch.from_numpy(target[:0]).dtype).view(array.shape)
            for array, target, start, size in zip(arrays, staged, starts, sizes, strict=False)
        ]


def _stage(array: NDArray[Any], target: NDArray[Any], spread: Spread) -> None:
    def copy(part: slice) -> None:
        target[part] = array[part]

    spread.map(copy, spread.parts(len(array), LEAST_COPIED))


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
        self.transfer = Transfer(device)
        self._thread = threads_for(device, 1, "recpipe-io")
        self._writes: list[Future[None]] = []

    def fetch(self, rows: RowIds) -> Future[Sent]:
        """Queue a fetch of ``rows`` for training: their records, float32 [n, width]."""
        return self._thread.submit(self._counted, "fetch", self._fetch, rows)

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

    def _counted(self, kind: Literal["fetch", "write"], work: Callable[..., T], *given: Any) -> T:
        """Do ``work`` for training: its traffic and seconds count."""
        start, before = perf_counter(), replace(self.store.io)
        done = work(*given)
        self.counters = self.counters.plus(self.store.io.plus(before, -1))
        setattr(self.times, kind, getattr(self.times, kind) + perf_counter() - start)
        return done
