"""How many threads torch's operators use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


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
