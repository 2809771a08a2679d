"""A GPU that copies as late as it may, for tests of what must wait for what.

Tensors stay on the CPU. A copy that is asked for on a stream of its own leaves the tensor full of rubbish
until something waits for the stream; work on the default stream is done at once. So code that does not wait
computes with rubbish, each time, where a real GPU would do so now and then.

Operators are the CPU's and follow no stream, so that a stream of high priority, which is for operators on
what was copied there, makes its copies at once. The emulated GPU shows what must wait for that one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

RUBBISH = 0x7B
"""The value of every byte that has not been copied yet: as an index it is out of every table."""
GPU = torch.device("cuda", 0)


class Stream:
    """A queue of copies that have not been made."""

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.device, self.priority = device, priority
        self.late: list[Callable[[], None]] = []
        self.made = 0
        """How many copies were ever made."""
        self._one_at_a_time = threading.RLock()

    def add(self, copy: Callable[[], None]) -> None:
        """Make ``copy`` later."""
        with self._one_at_a_time:
            self.late.append(copy)
        if self.priority < 0:
            self.catch_up()

    def end(self) -> int:
        """How many copies will have been made when all so far are."""
        with self._one_at_a_time:
            return self.made + len(self.late)

    def catch_up(self, count: int | None = None) -> None:
        """Make the first copies, all of them if ``count`` is None."""
        with self._one_at_a_time:
            while self.late and (count is None or self.made < count):
                self.late.pop(0)()
                self.made += 1

    def wait_stream(self, other: Stream) -> None:
        other.catch_up()

    def wait_event(self, event: Event) -> None:
        event.synchronize()


class Event:
    """A place in the queue of a stream."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.stream, self.count = Stream(), 0

    def record(self, stream: Stream) -> None:
        self.stream, self.count = stream, stream.end()

    def synchronize(self) -> None:
        self.stream.catch_up(self.count)


class FakeGpu:
    """``torch.cuda`` while the fixture ``gpu`` is in use."""

    def __init__(self) -> None:
        self.default = Stream()
        self.here = threading.local()
        self.set: list[tuple[str, torch.device]] = []
        """Each thread that set its current GPU, and to which."""
        self.lent: list[tuple[int, Stream]] = []
        """The memory of each tensor that was recorded for a stream."""
        self.copies = 0

    def current(self, device: object = None) -> Stream:
        return getattr(self.here, "stream", self.default)

    @contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        before, self.here.stream = self.current(), stream or self.current()
        try:
            yield
        finally:
            self.here.stream = before

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy when the current stream does."""
        self.copies += 1
        stream = self.current()
        if stream is self.default:
            target.copy_(source)
            return
        if target.numel():
            target.view(-1).view(torch.uint8).fill_(RUBBISH)
        stream.add(lambda: _COPY(target, source))


_TO, _EMPTY, _COPY = torch.Tensor.to, torch.empty, torch.Tensor.copy_


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """``torch.device("cuda")`` is a ``FakeGpu``, as far as streams, events and copies go."""
    fake = FakeGpu()

    def to(tensor: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        device = arguments[0] if arguments else named.get("device")
        if not isinstance(device, torch.device) or device.type != "cuda":
            return _TO(tensor, *arguments, **named)
        target = torch.empty_like(tensor)
        fake.copy(tensor, target)
        return target

    def copied(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if non_blocking:
            fake.copy(source, target)
            return target
        return _COPY(target, source)

    def empty(*arguments: Any, pin_memory: bool = False, **named: Any) -> torch.Tensor:
        return _EMPTY(*arguments, **named)

    def lend(tensor: torch.Tensor, stream: Stream) -> None:
        fake.lent.append((tensor.untyped_storage().data_ptr(), stream))

    def use(device: torch.device) -> None:
        fake.set.append((threading.current_thread().name, device))

    for name, value in {
        "Stream": Stream,
        "Event": Event,
        "stream": fake.stream,
        "current_stream": fake.current,
        "current_device": lambda: 0,
        "set_stream": lambda stream: setattr(fake.here, "stream", stream),
        "set_device": use,
        "synchronize": lambda device=None: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name, value in {"to": to, "copy_": copied, "record_stream": lend}.items():
        monkeypatch.setattr(torch.Tensor, name, value)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch, "empty", empty)
    return fake
