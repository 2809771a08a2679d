"""Clocks of work that a GPU does later than the program asks for it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from time import perf_counter

import torch

from recpipe.common.device import current_stream

Mark = float | torch.cuda.Event
"""A point in the work of a thread: seconds of ``perf_counter``, or an event on the stream of a GPU."""
OPEN = 512
"""Spans of a GPU that are kept as events; of more, the earlier half is read, which has ended long since."""


def mark(device: torch.device) -> Mark:
    """The end of the work that this thread has asked ``device`` for so far; does not wait for it."""
    if device.type != "cuda":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(current_stream())
    return event


def settled(device: torch.device) -> float:
    """``perf_counter()`` when a GPU has done all work that it was asked for; on a CPU, now."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()


class Spans:
    """Seconds between pairs of marks, in their order. On a GPU they are read when they are asked for."""

    def __init__(self) -> None:
        self._read = array("d")
        self._open: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def add(self, start: Mark, end: Mark) -> None:
        """Add the time from ``start`` to ``end``, two marks of one device."""
        if isinstance(start, float) and isinstance(end, float):
            self._read.append(end - start)
            return
        assert not isinstance(start, float), "both are of one device"
        assert not isinstance(end, float), "both are of one device"
        self._open.append((start, end))
        if len(self._open) > OPEN:
            self._settle(OPEN // 2)

    def each(self) -> Sequence[float]:
        """The seconds of all spans; waits for a GPU."""
        self._settle(len(self._open))
        return self._read

    def total(self) -> float:
        """Their sum; waits for a GPU."""
        return sum(self.each())

    def _settle(self, count: int) -> None:
        for start, end in self._open[:count]:
            end.synchronize()
            self._read.append(1e-3 * start.elapsed_time(end))
        del self._open[:count]
