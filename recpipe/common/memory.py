"""Memory of this machine: how much there is, how much is free, and a one-line error for what cannot fit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from recpipe.common.sizes import readable_bytes
from recpipe.errors import UserError

CGROUPS = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")
RESERVE = 0.1
"""The share of a GPU's memory that no table is planned for."""


def there(device: torch.device) -> int:
    """Bytes that this process could allocate on ``device``; on a CPU its share of swap space counts as well.

    This is what is free now, but at most the whole divided by the number of ranks on this machine, since the
    others may not have taken their share yet.
    """
    if device.type == "cuda":
        return _of_gpu(device)[0]
    free, whole = _host()
    return min(free, whole // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def plannable(device: torch.device) -> int:
    """Bytes of a GPU's memory that tables may be planned for: what is there without ``RESERVE`` of the whole,
    for activations, workspaces and messages."""
    free, whole = _of_gpu(device)
    return max(0, free - int(RESERVE * whole))


def free_memory() -> int:
    """Bytes of host memory that this process could allocate."""
    return there(torch.device("cpu"))


def _of_gpu(device: torch.device) -> tuple[int, int]:
    """Free and total memory; torch's allocator has kept some of the free memory for this process."""
    free, whole = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + kept, whole


def _host() -> tuple[int, int]:
    """Free and total memory with swap, of the machine or of this container if it has less."""
    try:
        rows = (line.split() for line in MEMINFO.read_text().splitlines())
        info = {row[0].rstrip(":"): int(row[1]) << 10 for row in rows}
        free, whole = info["MemAvailable"] + info["SwapFree"], info["MemTotal"] + info["SwapTotal"]
    except (OSError, KeyError):  # not Linux
        free = whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = int((CGROUPS / "memory.max").read_text())
        used = int((CGROUPS / "memory.current").read_text())
        rows = (line.split() for line in (CGROUPS / "memory.stat").read_text().splitlines())
        cached = int({row[0]: row[1] for row in rows}["file"])
    except (OSError, ValueError, KeyError):  # no limit ("max"), or no cgroup v2
        return free, whole
    return min(free, limit - used + cached), min(whole, limit)


def require(needs: Mapping[str, int], device: torch.device, remedy: str) -> None:
    """``UserError`` with ``remedy`` unless there is room for ``needs``: bytes by what they are for."""
    wanted, free = sum(needs.values()), there(device)
    if wanted <= free:
        return
    parts = ", ".join(f"{what} {readable_bytes(size)}" for what, size in needs.items())
    where = f"of {device}" if device.type == "cuda" else "of memory"
    raise UserError(
        f"this run needs at least {readable_bytes(wanted)} {where} ({parts}), and {readable_bytes(free)} "
        f"are there: {remedy}"
    )
