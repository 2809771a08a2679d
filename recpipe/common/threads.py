"""How many threads torch's operators use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    """torch's operators that this thread calls use so many."""
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def one_thread() -> AbstractContextManager[None]:
    """torch's operators keep to the thread that calls them."""
    return using_threads(1)


def keep_to_one_core() -> None:
    """torch's operators keep to this thread, which is new, for as long as it lives."""
    torch.get_num_threads()  # else the thread's first operator would take the number of all threads again
    torch.set_num_threads(1)
