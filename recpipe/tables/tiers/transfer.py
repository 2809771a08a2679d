"""Moves records between the device and host memory without stopping the device.

On a CPU both are the same memory and nothing is copied. On CUDA, records pass through page-locked
buffers; copies to the device run on a stream of their own and the training stream waits for an event.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from recpipe.tables.stores.base import Records


@dataclass
class Landed:
    """Records on the device, and what to wait for before they are read."""

    records: torch.Tensor
    ready: torch.cuda.Event | None

    def use(self) -> torch.Tensor:
        """The records, float32 [n, width]; the current stream waits until they have arrived."""
        if self.ready is not None:
            stream = torch.cuda.current_stream(self.records.device)
            stream.wait_event(self.ready)
            self.records.record_stream(stream)
        return self.records


class Transfer:
    """Moves records for one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self.on_gpu else None  # type: ignore[no-untyped-call]

    def host_buffer(self, rows: int, width: int) -> torch.Tensor:
        """Uninitialised float32 [rows, width] in host memory, page-locked for a GPU."""
        return torch.empty((rows, width), dtype=torch.float32, pin_memory=self.on_gpu)

    def to_device(self, host: torch.Tensor) -> Landed:
        """Start the copy of ``host``; called from the I/O thread."""
        if self._stream is None:
            return Landed(host, None)
        with torch.cuda.stream(self._stream):
            records = host.to(self.device, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return Landed(records, event)

    def to_host(self, records: torch.Tensor) -> Callable[[], Records]:
        """Start the copy of ``records``. Call the result in the I/O thread to wait for the copy and get
        it."""
        if not self.on_gpu:
            return records.numpy
        host = self.host_buffer(*records.shape)
        host.copy_(records, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))

        def landed() -> Records:
            event.synchronize()
            array: Records = host.numpy()
            return array

        return landed
