"""Memory that takes none until something is written into it."""

from __future__ import annotations

import mmap
from math import prod

import numpy as np
import torch

_LARGE = 4 << 20
"""From so many bytes on the system is asked for large pages, as numpy does: rows at random places of small
ones cost a look into the page table each."""


def untouched(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the CPU, at the start of a page. ``torch.zeros`` writes them; here the system has them ready,
    page by page, when one is first written. ``MemoryError`` if the system will not promise so much."""
    size = prod(shape) * dtype.itemsize
    try:
        own = mmap.mmap(-1, max(size, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as fault:
        raise MemoryError(f"{size} bytes: {fault}") from fault
    if size >= _LARGE and hasattr(mmap, "MADV_HUGEPAGE"):
        own.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(own, np.uint8, size)).view(dtype).view(shape)
