"""A GPU for machines without one, under a CUDA build of torch and FBGEMM: all of CUDA but the kernels.

``run.sh`` runs a command on it, such as the suite for a GPU (``tests/gpu``) or ``benchmarks/gpu.py``. What
runs is what runs on a GPU: ``torch.cuda`` and its allocators, streams and events, FBGEMM's and TorchRec's
code for CUDA, NCCL with one rank. Two things stand in for the GPU:

- ``runtime.cpp`` for CUDA's runtime. Device memory is host memory. A copy is made when somebody waits for it,
  not before: who does not wait sees old values.
- ``operators.py`` and ``fbgemm.py`` for the kernels: operators of the CPU on the same memory, at once; a CUDA
  graph repeats operators, not kernels.

So it shows wrong devices, operators that a GPU lacks, copies that nobody waits for, and threads that wait for
each other. It shows nothing of CUDA's own kernels, of what comes before a slow kernel has ended, or of time.
"""

import importlib.util
import os
from pathlib import Path

import torch


def load() -> None:
    """Give torch and FBGEMM the kernels; torch calls this when it is imported (``site/`` names it).

    FBGEMM itself may be what imports torch, so that its libraries are loaded here and not by an import.
    """
    from tests.pretend_gpu.graph import FakeCudaGraph

    torch.cuda.CUDAGraph = FakeCudaGraph  # type: ignore[assignment, misc]
    if os.environ.get("EMULATED_GPU_KERNELS") == "none":
        FakeCudaGraph.replay = lambda graph: None  # type: ignore[method-assign]
        return
    spec = importlib.util.find_spec("fbgemm_gpu")
    assert spec is not None, "the emulated GPU is for torch with FBGEMM"
    assert spec.origin is not None
    for library in sorted(Path(spec.origin).parent.glob("fbgemm_gpu*.so")):
        torch.ops.load_library(library)

    from . import fbgemm, operators

    operators.install()
    fbgemm.install()
