"""A GPU over a run: what is left on it before, the most that was used, and errors in one line."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from recpipe.errors import UserError, shown

FULL = ("out of memory", "ALLOC_FAILED")
"""Words of the errors of CUDA and cuBLAS if a GPU's memory is full."""
_OR_CPU = "or set trainer.device=cpu"
UNUSABLE = {
    "busy or unavailable": "another process has it for itself (exclusive compute mode): wait, choose another "
    f"by CUDA_VISIBLE_DEVICES, {_OR_CPU}",
    "no kernel image is available": "torch or FBGEMM, as they are installed, have no kernels for a GPU of "
    f"this age: install releases that have, {_OR_CPU}",
    "driver on your system is too old": f"update the driver, {_OR_CPU}",
    "driver version is insufficient": f"update the driver, {_OR_CPU}",
    "Found no NVIDIA driver": "install one, or set trainer.device=cpu",
}
"""Remedies for a GPU that cannot be used, by words of the error."""


def begin_on(device: torch.device) -> None:
    """Free what earlier runs of this process have left on a GPU, and measure its peak anew; nothing for a
    CPU."""
    if device.type == "cuda":
        gc.collect()  # a run's trainer, module and callbacks reference each other
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_gpu_bytes(device: torch.device) -> int | None:
    """The most bytes of a GPU that tensors took at a time since ``begin_on``; None for a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def why_no_gpu() -> str:
    """Why torch sees no GPU."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return f"torch {torch.__version__} is built for CPUs"
    if hidden is not None and not hidden.strip():
        return "CUDA_VISIBLE_DEVICES is empty, which hides them"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as fault:
        said = shown(str(fault).partition("\n")[0], 200)
        return said if hidden is None else f"{said}; CUDA_VISIBLE_DEVICES={shown(hidden)}"
    return "it has none"


def tried_out() -> str:
    """What a run of kernels of torch's and FBGEMM's on the first GPU shows, in words; ``UserError`` if they
    do not run. FBGEMM must have been imported."""
    if not torch.cuda.is_available():
        return f"torch sees no GPU ({why_no_gpu()}); recipes run on the CPU"
    with gpu_explained():
        torch.ops.fbgemm.asynchronous_complete_cumsum(torch.tensor([1, 2], device="cuda")).cpu()
    return f"torch's and FBGEMM's kernels run on {torch.cuda.get_device_name(0)}"


@contextmanager
def gpu_explained() -> Iterator[None]:
    """In the block, a GPU whose memory is full or that cannot be used is a ``UserError`` of one line.

    Other errors of a GPU are faults of a program, and pass as they are.
    """
    try:
        yield
    except (RuntimeError, UserError) as fault:  # torch.OutOfMemoryError and torch.AcceleratorError are such
        said = explanation(str(fault.__cause__ if isinstance(fault, UserError) else fault))
        if said is None:
            raise
        raise UserError(said) from fault


def explanation(text: str) -> str | None:
    """One line for torch's error ``text`` about a GPU; None if the program is at fault."""
    first = text.partition("\n")[0].partition(" Including non-PyTorch memory")[0]
    if first.startswith(("CUDA", "CUBLAS")) and any(words in first for words in FULL):
        return (
            f"the memory of the GPU is full ({shown(first, 200)}): lower data.batch_size, "
            "tiers.resident_bytes or the model's sizes, or keep rows elsewhere, as tiers.policy=lru does"
        )
    remedy = next((remedy for words, remedy in UNUSABLE.items() if words in text), None)
    return None if remedy is None else f"the GPU cannot be used ({shown(first, 200)}): {remedy}"
