"""Moves records and indices between the device and host memory without stopping the device.

On a CPU both are the same memory and nothing is copied. On CUDA, everything passes through page-locked
buffers, on streams of its own: records to the device, records to the host, and indices, which need not wait
behind records. torch keeps a page-locked buffer until the copy out of it is done, so that it may be dropped
at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.common.device import Aside, arrived, current_stream
from recpipe.common.loops import LEAST_COPIED, Spread
from recpipe.plugin.store import Records

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
    """Moves records and indices for one device; from any thread. Here that is the CPU, whose memory is the
    host's, so that nothing is copied."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @classmethod
    def on(cls, device: torch.device) -> Transfer:
        """The transfer for ``device``."""
        return GpuTransfer(device) if device.type == "cuda" else cls(device)

    def host_buffer(self, rows: int, width: int) -> torch.Tensor:
        """Uninitialised float32 [rows, width] in host memory."""
        return torch.empty((rows, width), dtype=torch.float32)

    def to_device(self, host: torch.Tensor) -> Sent:
        """Start the copy of records; called from the I/O thread."""
        return Sent([host], None)

    def to_host(self, records: torch.Tensor, used: Sequence[torch.Tensor] = ()) -> Callable[[], Records]:
        """What copies ``records``, which are not changed later, once they are made, and waits for the copy.
        The I/O thread calls it, which has less to do than this one. ``used``: tensors whose last use is on
        the current stream; they are kept until then."""
        return records.numpy

    def let_go(self, used: Sequence[torch.Tensor]) -> None:
        """Drop tensors whose last use is on the current stream, and which were made on others."""

    def to_host_now(self, values: torch.Tensor) -> NDArray[Any]:
        """``values``, which are made on the current stream; waits for them."""
        return values.numpy()

    def send(self, *positions: Positions) -> Sent:
        """Start to copy ``positions`` ([n] each) to the device, all in one copy; they arrive as int64. On a
        CPU the tensors share the memory of arrays that are int64 already."""
        return Sent(self.positions_now(*positions), None)

    def positions_now(self, *positions: Positions) -> list[torch.Tensor]:
        """A tensor for each of ``positions``, int64, copied on the current stream."""
        return [torch.from_numpy(each.astype(np.int64, copy=False)) for each in positions]

    def arrays_now(self, arrays: Sequence[NDArray[Any]], spread: Spread) -> list[torch.Tensor]:
        """Copy ``arrays`` of any type to the device on the current stream, all in one copy. ``spread``:
        threads that put them into the page-locked buffer."""
        return [torch.from_numpy(array) for array in arrays]


class GpuTransfer(Transfer):
    """Through page-locked buffers, on streams of its own."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._records, self._back, self._indices = Aside(device), Aside(device), Aside(device)

    def host_buffer(self, rows: int, width: int) -> torch.Tensor:
        """Page-locked."""
        return torch.empty((rows, width), dtype=torch.float32, pin_memory=True)

    def to_device(self, host: torch.Tensor) -> Sent:
        """On the stream of records."""
        with self._records.stream():
            records = host.to(self.device, non_blocking=True)
        return Sent([records], self._records.mark())

    def to_host(self, records: torch.Tensor, used: Sequence[torch.Tensor] = ()) -> Callable[[], Records]:
        """On the stream of records that come back."""
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
        """Tell torch's allocator which stream has used them."""
        for tensor in used:
            tensor.record_stream(current_stream())

    def to_host_now(self, values: torch.Tensor) -> NDArray[Any]:
        """Through a page-locked buffer."""
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(current_stream())
        copied.synchronize()
        return host.numpy()

    def send(self, *positions: Positions) -> Sent:
        """On the stream of indices."""
        with self._indices.stream():
            tensors = self.positions_now(*positions)
        return Sent(tensors, self._indices.mark())

    def positions_now(self, *positions: Positions) -> list[torch.Tensor]:
        """A tensor for each of ``positions``, int64, copied on the current stream."""
        sizes = [len(each) for each in positions]
        host = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=True)
        np.concatenate(positions, out=host.numpy())
        there = host.to(self.device, non_blocking=True)
        return [there] if len(sizes) == 1 else list(there.split(sizes))  # type: ignore[no-untyped-call]

    def arrays_now(self, arrays: Sequence[NDArray[Any]], spread: Spread) -> list[torch.Tensor]:
        """Through one page-locked buffer."""
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
