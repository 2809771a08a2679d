"""A GPU over a run: the current one of each thread, work beside the training's kernels, what tensors take of
its memory, errors in one line; and how many threads torch's operators use on a CPU."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakSet

import torch

from recpipe.errors import UserError, shown

_asides: WeakSet[Aside] = WeakSet()
"""All there are in this process."""
FULL = ("out of memory", "ALLOC_FAILED")
"""Words of the errors of CUDA and cuBLAS if a GPU's memory is full."""
_OR_CPU = "or set trainer.device=cpu"
UNUSABLE = {
    "busy or unavailable": "another process has it for itself (exclusive compute mode): wait, choose another "
    f"by CUDA_VISIBLE_DEVICES, {_OR_CPU}",
    "no kernel image is available": "torch or FBGEMM, as they are installed, have no kernels for a GPU of "
    f"this age: install releases that have, {_OR_CPU}",
    "driver on your system is too old": f"update the driver, {_OR_CPU}",
    "driver version is insufficient": f"update the driver, {_OR_CPU}",
    "Found no NVIDIA driver": "install one, or set trainer.device=cpu",
}
"""Remedies for a GPU that cannot be used, by words of the error."""


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


def begin_on(device: torch.device) -> None:
    """Free what earlier runs of this process have left on a GPU, and measure its peak anew; nothing for a
    CPU."""
    if device.type == "cuda":
        gc.collect()  # a run's trainer, module and callbacks reference each other
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_gpu_bytes(device: torch.device) -> int | None:
    """The most bytes of a GPU that tensors took at a time since ``begin_on``; None for a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def why_no_gpu() -> str:
    """Why torch sees no GPU."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return f"torch {torch.__version__} is built for CPUs"
    if hidden is not None and not hidden.strip():
        return "CUDA_VISIBLE_DEVICES is empty, which hides them"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as fault:
        said = shown(str(fault).partition("\n")[0], 200)
        return said if hidden is None else f"{said}; CUDA_VISIBLE_DEVICES={shown(hidden)}"
    return "it has none"


def tried_out() -> str:
    """What a run of kernels of torch's and FBGEMM's on the first GPU shows, in words; ``UserError`` if they
    do not run. FBGEMM must have been imported."""
    if not torch.cuda.is_available():
        return f"torch sees no GPU ({why_no_gpu()}); recipes run on the CPU"
    with gpu_explained():
        torch.ops.fbgemm.asynchronous_complete_cumsum(torch.tensor([1, 2], device="cuda")).cpu()
    return f"torch's and FBGEMM's kernels run on {torch.cuda.get_device_name(0)}"


@contextmanager
def gpu_explained() -> Iterator[None]:
    """In the block, a GPU whose memory is full or that cannot be used is a ``UserError`` of one line.

    Other errors of a GPU are faults of a program, and pass as they are.
    """
    try:
        yield
    except (RuntimeError, UserError) as fault:  # torch.OutOfMemoryError and torch.AcceleratorError are such
        said = explanation(str(fault.__cause__ if isinstance(fault, UserError) else fault))
        if said is None:
            raise
        raise UserError(said) from fault


def explanation(text: str) -> str | None:
    """One line for torch's error ``text`` about a GPU; None if the program is at fault."""
    first = text.partition("\n")[0].partition(" Including non-PyTorch memory")[0]
    if first.startswith(("CUDA", "CUBLAS")) and any(words in first for words in FULL):
        return (
            f"the memory of the GPU is full ({shown(first, 200)}): lower data.batch_size, "
            "tiers.resident_bytes or the model's sizes, or keep rows elsewhere, as tiers.policy=lru does"
        )
    remedy = next((remedy for words, remedy in UNUSABLE.items() if words in text), None)
    return None if remedy is None else f"the GPU cannot be used ({shown(first, 200)}): {remedy}"


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    """In the block, torch's operators called by this thread use so many threads."""
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def one_thread(wanted: bool = True) -> AbstractContextManager[None]:
    """In the block, if ``wanted``, torch's operators on a CPU run in the calling thread alone."""
    return using_threads(1) if wanted else nullcontext()


def in_this_thread() -> AbstractContextManager[None]:
    """In the block, a backward pass runs in the calling thread. torch would hand that of tensors on a GPU to
    a thread of its own and wait for it, which takes longer than to start a few kernels."""
    return torch.autograd.set_multithreading_enabled(False)


def keep_to_one_core() -> None:
    """Make torch's operators run in this new thread alone for as long as it lives."""
    torch.get_num_threads()  # otherwise the thread's first operator would reset the number of threads
    torch.set_num_threads(1)
