"""Copies between host memory and a GPU, by size and by whether the host's memory is page-locked; nothing
without CUDA."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from recpipe.profiling.limits import Sample

SIZES = (2**12, 2**16, 2**20, 2**24, 2**27)
"""Bytes."""
REPEATS = 9


def measure(quick: bool) -> Iterator[Sample]:
    """Samples ``copy to device`` and ``copy to host``."""
    if not torch.cuda.is_available():
        return
    for size in SIZES[1:4] if quick else SIZES:
        device = torch.zeros(size, dtype=torch.uint8, device="cuda")
        for pinned in (True, False):
            host = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
            for kind, target, source in (("copy to device", device, host), ("copy to host", host, device)):
                yield Sample(kind, {"bytes": float(size), "pinned": float(pinned)}, _seconds(target, source))


def _seconds(target: torch.Tensor, source: torch.Tensor) -> float:
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return sorted(times)[REPEATS // 2]
