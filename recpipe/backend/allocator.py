"""Makes the memory allocators keep what a training step frees, in huge pages, since the next step needs it
again.

By default glibc returns every block above a threshold to the kernel, and the next step faults its pages in
again.
"""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

_SETTINGS = {
    "M_MMAP_THRESHOLD": (-3, 2**31 - 1),
    "M_TRIM_THRESHOLD": (-1, 2**31 - 1),
    "M_TOP_PAD": (-2, 64 << 20),
    "M_ARENA_MAX": (-8, 3),
}
"""Parameters of mallopt(3) by name: number and value.

There are three arenas. The two threads that train have one each, so that a core finds in its cache what it
has just freed. All other threads share the third, so that memory does not grow with their number.
"""
_KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Variables of oneDNN and of torch's layer above it: how many kernels they keep, one for each input size."""
_KERNELS = "512"
"""Half of the defaults. A step of a deep DLRM uses 30 to 40 kernels. Batches of ever new sizes fill the
caches, with a quarter of a MiB or more per kernel."""
_HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""torch's switch: blocks of 2 MiB and more ask for huge pages. It is read at the first such block."""
_applied: list[str] = []


def tune_allocator() -> None:
    """Apply the settings if the system has them and the user has set none of their variables. Call it before
    torch allocates memory.
    """
    if _applied or platform.libc_ver()[0] != "glibc":
        return
    if any(name.startswith("MALLOC_") for name in os.environ) or "GLIBC_TUNABLES" in os.environ:
        return
    library = ctypes.CDLL(None)
    for name, (number, value) in _SETTINGS.items():
        if library.mallopt(number, value):
            _applied.append(f"{name}={value}")
    try:
        on_advice = "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        on_advice = False
    # A parent process of recpipe may have set it.
    if on_advice and os.environ.setdefault(_HUGE_PAGES, "1") == "1":
        _applied.append(f"{_HUGE_PAGES}=1")


def bound_kernel_caches() -> None:
    """Make oneDNN and torch keep fewer matrix kernels; a user's own settings stay. Call it before torch is
    loaded.
    """
    for name in _KERNEL_CACHES:
        os.environ.setdefault(name, _KERNELS)


def allocator_settings() -> list[str]:
    """What ``tune_allocator`` has set in this process."""
    return list(_applied)
