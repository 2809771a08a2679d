"""The environment of a run: machine, versions and commit, for report.json and compare.json."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from recpipe.backend.allocator import allocator_settings
from recpipe.backend.choices import processor
from recpipe.backend.matmul import float32_matmul

_PACKAGES = {
    "recpipe": ("recpipe",),
    "torch": ("torch",),
    "torchrec": ("torchrec", "torchrec-cpu"),
    "fbgemm": ("fbgemm-gpu", "fbgemm-gpu-cpu"),
    "lightning": ("lightning",),
}


def environment() -> dict[str, Any]:
    """Machine and versions as JSON values; a figure that the system does not offer is None.

    ``cores``: those that this process may use. ``threads``: those that torch uses for one operator.
    ``allocator``: settings made for glibc and torch. ``float32_matmul``: the library that multiplies matrices
    on the CPU. ``ram_bytes``: the machine's memory. ``commit`` (with ``-dirty`` if files differ): only in a
    checkout.
    """
    # The driver may know of more GPUs, which it is too old for.
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "cpu": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "allocator": allocator_settings(),
        "float32_matmul": float32_matmul(),
        "ram_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "gpu": [torch.cuda.get_device_name(number) for number in range(gpus)],
        "cuda": torch.version.cuda,
        "os": platform.platform(),
        "python": platform.python_version(),
        **{name: _version(packages) for name, packages in _PACKAGES.items()},
        "commit": _commit(),
    }


@cache
def _version(packages: tuple[str, ...]) -> str | None:
    for package in packages:
        with suppress(PackageNotFoundError):
            return version(package)
    return None


@cache
def _commit() -> str | None:
    """The checkout's commit, read once, since a process runs what it has imported."""
    here = Path(__file__)
    found = None
    # Only where this file is tracked: not in a venv inside another's checkout.
    for words in (
        ["ls-files", "--error-unmatch", here.name],
        ["describe", "--always", "--dirty", "--abbrev=40"],
    ):
        try:
            done = subprocess.run(
                ["git", *words], cwd=here.parent, capture_output=True, text=True, timeout=10
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        if done.returncode:
            return None
        found = done.stdout.strip()
    return found
