"""glibc's allocator told to keep what a training step frees: the next step wants the same again.

By default it returns every block above a threshold to the kernel, and the next step faults its pages in anew.
"""

from __future__ import annotations

import ctypes
import os
import platform

_SETTINGS = {
    "M_MMAP_THRESHOLD": (-3, 2**31 - 1),
    "M_TRIM_THRESHOLD": (-1, 2**31 - 1),
    "M_TOP_PAD": (-2, 64 << 20),
    "M_ARENA_MAX": (-8, 1),
}
"""Parameters of mallopt(3) by name: number and value. One arena: what one thread frees, others reuse."""
_applied: list[str] = []


def keep_freed_memory() -> None:
    """Apply the settings where the C library is glibc and the user has set none of malloc's variables."""
    if _applied or platform.libc_ver()[0] != "glibc":
        return
    if any(name.startswith("MALLOC_") for name in os.environ) or "GLIBC_TUNABLES" in os.environ:
        return
    library = ctypes.CDLL(None)
    for name, (number, value) in _SETTINGS.items():
        if library.mallopt(number, value):
            _applied.append(f"{name}={value}")


def allocator_settings() -> list[str]:
    """What ``keep_freed_memory`` has set in this process."""
    return list(_applied)
