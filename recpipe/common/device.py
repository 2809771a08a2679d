"""The current GPU of each thread, and copies to a GPU beside the training's kernels."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakSet

import torch


def use_device(device: torch.device) -> None:
    """Make ``device`` the current GPU of this thread; nothing for a CPU.

    The current GPU belongs to a thread and is GPU 0 in a new one. Page-locked memory, events, planners and
    NCCL use it, so that without this call every rank would also take memory of GPU 0.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def uses_gpu() -> bool:
    """Whether this process has begun to use a GPU, without which no tensor can be on one. A run on the CPU of
    a machine that has a GPU does not."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


@contextmanager
def same_bits(wanted: bool, device: torch.device) -> Iterator[None]:
    """In the block, if ``wanted``, a GPU uses only algorithms that give the same bits each time; torch raises
    an error where there is none.

    FBGEMM's update then adds a row's gradients in the order of its lookups. Otherwise it shares out those of
    a row that is looked up more than 1,024 times, and adds the parts as they come. A CPU gives the same bits
    anyway, and nothing is changed.
    """
    if not wanted or device.type != "cuda":
        yield
        return
    # cuBLAS reads it when it is first used; without it torch refuses matrix products.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # all memory is written before it is read
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        memory.fill_uninitialized_memory = filled


def threads_for(device: torch.device, count: int, name: str) -> ThreadPoolExecutor:
    """``count`` threads whose current GPU is ``device``."""
    return ThreadPoolExecutor(count, name, initializer=use_device, initargs=(device,))


def current_stream() -> torch.cuda.Stream:
    """This thread's stream on its current GPU, whose number torch takes longer to find out itself."""
    return torch.cuda.current_stream(torch.cuda.current_device())


def given_so_far(device: torch.device) -> Callable[[], bool]:
    """Returns what tells, whenever it is called, whether the current stream has done all that it was given
    until now; a CPU always has."""
    if device.type != "cuda":
        return lambda: True
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(current_stream())
    return event.query


class _On:
    """``torch.cuda.stream`` in less than half of its time, for streams of this thread's current GPU.

    It is entered several times for each batch, and while this thread runs Python no other one can.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._before = current_stream()
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self._before)


class Aside:
    """Work for ``device`` that runs on a stream of its own, beside the training's. On a CPU it does nothing.

    A thread begins the work in ``stream`` and then takes the event of ``mark``. Before another stream uses
    the results it waits for that event (``arrived``).
    """

    def __init__(self, device: torch.device, first: bool = False) -> None:
        """``first``: its kernels, few and short, come before others that wait for the GPU."""
        self.device = device
        priority = -1 if first else 0
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device, priority) if on_gpu else None  # type: ignore[no-untyped-call]
        _asides.add(self)

    def stream(self, after: bool = False) -> AbstractContextManager[None]:
        """In the block, this thread's work for the GPU goes to this stream; with ``after``, it begins when
        what the thread's stream has been given so far is done."""
        if self._stream is None:
            return nullcontext()
        if after:
            self._stream.wait_stream(current_stream())
        return _On(self._stream)

    def mark(self) -> torch.cuda.Event | None:
        """An event after all work that the stream has been given so far; None on a CPU."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def lend(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, whose memory is not given to others before this stream has passed this point."""
        if self._stream is not None:
            tensor.record_stream(self._stream)
        return tensor


_asides: WeakSet[Aside] = WeakSet()
"""All there are in this process."""


def lone_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of a GPU that no ``Aside`` has: torch hands out the same 32 of a priority again and again."""
    taken = {aside._stream for aside in tuple(_asides)}
    for _ in range(32):
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        if stream not in taken:
            return stream
    return torch.cuda.Stream(device, -2)  # type: ignore[no-untyped-call]  # of a priority that none has


def arrived(event: torch.cuda.Event | None, parts: Iterable[Any]) -> None:
    """Let this thread's stream wait for ``event``, after which it may use ``parts``; None: nothing to wait
    for.

    ``parts``, tensors or anything else with ``record_stream``, were made on another stream. Their memory is
    not given to others before this thread's stream has passed this point.
    """
    if event is None:
        return
    stream = current_stream()
    stream.wait_event(event)
    for part in parts:
        part.record_stream(stream)
