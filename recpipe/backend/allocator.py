"""The memory allocators told to keep what a training step frees, in huge pages: the next step wants it again.

By default glibc returns every block above a threshold to the kernel, and the next step faults its pages in
anew.
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

Three arenas: one each for the two threads that train, so that each core finds in its cache what it has just
freed, and one that all others share, so that memory does not grow with their number.
"""
_KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Of oneDNN and of torch's layer above it: how many kernels, each for one size of its inputs, they keep."""
_KERNELS = "512"
"""Half of their defaults. A step of a deep DLRM takes 30 to 40; batches of ever new sizes fill the caches, at
a quarter of a MiB or more each."""
_HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""torch's switch: blocks of 2 MiB and more are advised to be huge pages. Read at its first such block."""
_applied: list[str] = []


def tune_allocator() -> None:
    """Apply the settings where the system has them and the user has set none of their variables.

    To be called before torch allocates.
    """
    if _applied or platform.libc_ver()[0] != "glibc":
        return
    if any(name.startswith("MALLOC_") for name in os.environ) or "GLIBC_TUNABLES" in os.environ:
        return
    library = ctypes.CDLL(None)
    for name, (number, value) in _SETTINGS.items():
        if library.mallopt(number, value):
            _applied.append(f"{name}={value}")
    # A parent process of ours may have set it.
    if _on_advice() and os.environ.setdefault(_HUGE_PAGES, "1") == "1":
        _applied.append(f"{_HUGE_PAGES}=1")


def bound_kernel_caches() -> None:
    """Let oneDNN and torch keep fewer matrix kernels; a user's own settings stay.

    To be called before torch is loaded.
    """
    for name in _KERNEL_CACHES:
        os.environ.setdefault(name, _KERNELS)


def _on_advice() -> bool:
    """Whether the kernel gives huge pages to those who ask."""
    try:
        return "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return False


def allocator_settings() -> list[str]:
    """What ``tune_allocator`` has set in this process."""
    return list(_applied)
