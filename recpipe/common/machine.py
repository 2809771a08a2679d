"""This machine: how much memory is free, with a one-line error for what cannot fit; and how much of its
processors other programs take, so that measurements are kept only where it was little."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from recpipe.common.words import readable_bytes
from recpipe.errors import UserError

if TYPE_CHECKING:  # commands that wait for no torch ask how busy the machine is
    import torch

CGROUPS = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")
RESERVE = 0.1
"""The share of a GPU's memory that no table is planned for."""
T = TypeVar("T")
BUSY_OTHERS = 0.1
"""Share of the machine from which on a measurement reports that other programs used it, and is not kept."""
KEEPS_ALL = "RECPIPE_BUSY"
"""The environment variable that, with the value ``keep``, lets measurements be kept on a machine that is
never quiet."""
TRIES = 3
"""How often something is measured at most until two measurements agree."""
_STAT = Path("/proc/stat")
_IDLE = slice(3, 5)
"""The columns ``idle`` and ``iowait``."""
_GUESTS = slice(0, 8)
"""The columns to add, without ``guest`` and ``guest_nice``, which ``user`` and ``nice`` include."""


def there(device: torch.device) -> int:
    """Bytes that this process could allocate on ``device``; on a CPU its share of swap space counts as well.

    This is what is free now, but at most the whole divided by the number of ranks on this machine, since the
    others may not have taken their share yet.
    """
    if device.type == "cuda":
        return _of_gpu(device)[0]
    return free_memory()


def plannable(device: torch.device) -> int:
    """Bytes of a GPU's memory that tables may be planned for: what is there without ``RESERVE`` of the whole,
    for activations, workspaces and messages."""
    free, whole = _of_gpu(device)
    return max(0, free - int(RESERVE * whole))


def free_memory() -> int:
    """Bytes of host memory that this process could allocate."""
    free, whole = _host()
    return min(free, whole // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _of_gpu(device: torch.device) -> tuple[int, int]:
    """Free and total memory; torch's allocator has kept some of the free memory for this process."""
    import torch

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


@dataclass(frozen=True)
class Load:
    """Processor seconds since the machine started, of all its processors and of this process."""

    busy: float
    total: float
    own: float
    """With the seconds of children that it has waited for."""

    @classmethod
    def now(cls) -> Load | None:
        """The current figures, or None if the system does not offer them."""
        try:
            first = _STAT.read_text(encoding="ascii").partition("\n")[0].split()[1:]
        except OSError:
            return None
        ticks = os.sysconf("SC_CLK_TCK")
        columns = [int(value) / ticks for value in first[_GUESTS]]
        children = os.times()
        own = time.process_time() + children.children_user + children.children_system
        return cls(sum(columns) - sum(columns[_IDLE]), sum(columns), own)

    def others_since(self, earlier: Load | None) -> float | None:
        """The share of all processors' time since ``earlier`` that was neither idle nor this process's. It
        includes other virtual machines' time (``steal``)."""
        total = 0.0 if earlier is None else self.total - earlier.total
        if earlier is None or total <= 0:
            return None
        busy, own = self.busy - earlier.busy, self.own - earlier.own
        return min(1.0, max(0.0, (busy - own) / total))


def used_by_others(since: Load | None) -> float | None:
    """Share of all processors' time from ``since`` until now that others had; None if it is not known."""
    now = Load.now()
    return None if now is None else now.others_since(since)


def disturbance(others: float | None) -> str:
    """Why a measurement during which ``others`` had that share of the processors is not kept; empty if it
    is."""
    if others is None or others <= BUSY_OTHERS or os.environ.get(KEEPS_ALL) == "keep":
        return ""
    return f"other programs took {others:.0%} of this machine's processors"


@dataclass(frozen=True)
class Taken(Generic[T]):
    """A measurement; where it was ``disturbed``, why it must not be kept, else empty."""

    value: T
    disturbed: str = ""


def undisturbed(
    measure: Callable[[], T], agree: Callable[[T, T], bool] | None, tries: int = TRIES
) -> Taken[T]:
    """Measure until two measurements that nothing disturbed ``agree``, at most ``tries`` times; the last one.

    Without ``agree``, for what is repeated until it agrees within ``measure``, one that nothing disturbed is
    enough. On a machine that is never quiet (``KEEPS_ALL``) the first one is taken.
    """
    before: list[T] = []
    why = ""
    for _ in range(tries):
        began = Load.now()
        value = measure()
        why = disturbance(used_by_others(began))
        if why:
            continue
        if agree is None or os.environ.get(KEEPS_ALL) == "keep" or any(agree(each, value) for each in before):
            return Taken(value)
        before.append(value)
    return Taken(value, why or f"{tries} measurements of it do not agree")


def peak_rss_bytes() -> int:
    """Largest resident set of this process in bytes since its start or the last ``reset_peak_rss``."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    # Sandboxes and macOS lack VmHWM; getrusage counts KiB on Linux and bytes on macOS.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak_rss() -> bool:
    """Reset ``peak_rss_bytes`` to the present size; False if the kernel does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True
