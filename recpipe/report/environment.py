"""The environment of a run: machine, versions and commit, for report.json and compare.json."""

from __future__ import annotations

import os
import platform
import subprocess
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
    return {
        "cpu": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "allocator": allocator_settings(),
        "float32_matmul": float32_matmul(),
        "ram_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "gpu": _gpus(),
        "cuda": torch.version.cuda,
        "os": platform.platform(),
        "python": platform.python_version(),
        **{name: _version(packages) for name, packages in _PACKAGES.items()},
        "commit": _commit(),
    }


def _gpus() -> list[str]:
    """Names of the GPUs that torch can use; the driver may know of more, which it is too old for."""
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


@cache
def _version(packages: tuple[str, ...]) -> str | None:
    for package in packages:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


@cache
def _commit() -> str | None:
    """The checkout's commit, if this file is tracked there (not in a venv inside another's checkout).

    It is read once, since a process runs what it has imported.
    """
    here = Path(__file__)
    tracked = _git("ls-files", "--error-unmatch", here.name, cwd=here.parent)
    return (
        None if tracked is None else _git("describe", "--always", "--dirty", "--abbrev=40", cwd=here.parent)
    )


def _git(*arguments: str, cwd: Path) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=cwd, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
