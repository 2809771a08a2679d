"""Work on long arrays, shared among threads: numpy lets other threads run while it works on one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
LEAST = 1 << 16
"""A part has at least so many elements; passing one to a thread takes as long as work on some thousands."""
LEAST_COPIED = 1 << 19
"""The same of what is only copied. Each thread asks for Python's lock several times, for which the training's
thread then waits: that takes longer than to copy a part of a smaller array."""


class Spread:
    """``count`` threads, the calling one among them; with 1, everything runs in the calling one."""

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self._others = ThreadPoolExecutor(count - 1, "recpipe-spread") if count > 1 else None

    @classmethod
    def beside(cls, device: torch.device) -> Spread:
        """For planning batches of ``device``: a quarter of the cores, at most 4, where a GPU trains. Where
        the cores train, planning has one."""
        cores = len(os.sched_getaffinity(0)) if device.type == "cuda" else 1
        return cls(min(4, max(1, cores // 4)))

    def parts(self, length: int, least: int | None = None) -> list[slice]:
        """[0, ``length``) in parts of ``least`` (``LEAST``) elements or more, at most one for each thread."""
        count = max(1, min(self.count, length // (LEAST if least is None else least)))
        ends = [length * part // count for part in range(count + 1)]
        return [slice(*pair) for pair in pairwise(ends)]

    def map(self, work: Callable[..., T], *arguments: Iterable[Any]) -> list[T]:
        """``work`` for the first ones of ``arguments``, for the second ones, and so on, at the same time."""
        calls = list(zip(*arguments, strict=True))
        if self._others is None or len(calls) < 2:
            return [work(*call) for call in calls]
        others = [self._others.submit(work, *call) for call in calls[1:]]
        first = work(*calls[0])
        return [first, *(other.result() for other in others)]

    def close(self) -> None:
        """End the threads."""
        if self._others is not None:
            self._others.shutdown()


ALONE = Spread()
"""The calling thread alone."""
