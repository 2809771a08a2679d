"""Moves records and indices between the device and host memory without stopping the device.

On a CPU both are the same memory and nothing is copied. On CUDA, everything passes through page-locked
buffers, on streams of its own: records to the device, records to the host, and indices, which need not wait
behind records. torch keeps a page-locked buffer until the copy out of it is done, so that it may be dropped
at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.common.device import Aside, arrived
from recpipe.tables.stores.base import Records

ALIGNED = 16
"""Arrays that are copied together begin at multiples of so many bytes."""


@dataclass
class Landed:
    """Records on the device, and what to wait for before they are read."""

    records: torch.Tensor
    ready: torch.cuda.Event | None

    def use(self) -> torch.Tensor:
        """The records, float32 [n, width]; the current stream waits until they have arrived."""
        arrived(self.ready, (self.records,))
        return self.records


@dataclass
class Sent:
    """Arrays on their way to the device in one copy."""

    tensors: list[torch.Tensor]
    ready: torch.cuda.Event | None

    def use(self) -> list[torch.Tensor]:
        """A tensor for each array; the current stream waits until they have arrived."""
        arrived(self.ready, self.tensors[:1])  # the others lie in the same memory
        return self.tensors


class Transfer:
    """Moves records and indices for one device; from any thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"
        self._records, self._back, self._indices = Aside(device), Aside(device), Aside(device)

    def host_buffer(self, rows: int, width: int) -> torch.Tensor:
        """Uninitialised float32 [rows, width] in host memory, page-locked for a GPU."""
        return torch.empty((rows, width), dtype=torch.float32, pin_memory=self.on_gpu)

    def to_device(self, host: torch.Tensor) -> Landed:
        """Start the copy of ``host``; called from the I/O thread."""
        if not self.on_gpu:
            return Landed(host, None)
        with self._records.stream():
            records = host.to(self.device, non_blocking=True)
        return Landed(records, self._records.mark())

    def to_host(self, records: torch.Tensor) -> Callable[[], Records]:
        """Start the copy of ``records``. Call the result in the I/O thread to wait for the copy and get
        it."""
        if not self.on_gpu:
            return records.numpy
        host = self.host_buffer(*records.shape)
        with self._back.stream(after=True):
            host.copy_(self._back.lend(records), non_blocking=True)
        event = self._back.mark()
        assert event is not None, "on a GPU"

        def landed() -> Records:
            event.synchronize()
            array: Records = host.numpy()
            return array

        return landed

    def send(self, arrays: Sequence[NDArray[Any]]) -> Sent:
        """Start to copy ``arrays`` to the device, all in one copy. On a CPU the tensors share their
        memory."""
        if not self.on_gpu:
            return Sent([torch.from_numpy(array) for array in arrays], None)
        starts = np.cumsum([0, *(-(-array.nbytes // ALIGNED) * ALIGNED for array in arrays)]).tolist()
        host = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
        staged = host.numpy()
        for array, start in zip(arrays, starts, strict=False):
            staged[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        with self._indices.stream():
            whole = host.to(self.device, non_blocking=True)
        parts = [
            whole[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
            for array, start in zip(arrays, starts, strict=False)
        ]
        return Sent(parts, self._indices.mark())
