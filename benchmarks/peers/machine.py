"""What figures were taken on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from work import versions

TELLING = ("OMP_", "GOMP_", "KMP_", "MKL_", "MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD", "ONEDNN_", "THP_")


def machine() -> dict[str, object]:
    """Processor, cores that may be used, versions, and settings of the environment that change speed."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": versions("torch", "torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu", "recpipe"),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(TELLING)},
    }


def cpu_model() -> str:
    """As Linux names it."""
    info = Path("/proc/cpuinfo")
    named = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.partition(":")[2].strip() for line in named if line.startswith("model name")), "unknown"
    )
