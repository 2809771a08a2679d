"""Which kernels multiply matrices on a CPU, so that its vector units are used whoever made it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from recpipe.backend.host import made_by_intel
from recpipe.errors import UserError

TOLERANCE = 1e-5
"""Largest error of float32 kernels, relative to the product's norm: theirs is below 1e-6, bfloat16's 1e-3."""


@contextmanager
def vector_units(device: torch.device) -> Iterator[None]:
    """Inside, float32 matrices are multiplied by oneDNN on CPUs that Intel did not make.

    There MKL takes its AVX2 path, at half the speed of AVX-512; on Intel's own it is up to a third faster
    than oneDNN at a few hundred samples. torch hands float32 products to oneDNN under the precision "medium",
    which also permits bfloat16: oneDNN may make use of that where the CPU has units for it. So one product is
    made and compared; where it was rounded, MKL stays. A precision that the user has set, and products on a
    GPU, are left alone.
    """
    before = torch.get_float32_matmul_precision()
    if device.type != "cpu" or before != "highest" or not has_onednn() or made_by_intel():
        yield
        return
    torch.set_float32_matmul_precision("medium")
    if _error("medium") > TOLERANCE:
        torch.set_float32_matmul_precision(before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@cache
def _error(precision: str) -> float:
    """Of a float32 product against float64, relative to its norm, under the ``precision`` that is set."""
    random = torch.Generator().manual_seed(0)
    left, right = (torch.randn(shape, generator=random) for shape in ((256, 512), (512, 256)))
    exact = left.double() @ right.double()
    return float((left @ right - exact).norm() / exact.norm())


def float32_matmul() -> str:
    """What multiplies float32 matrices on the CPU at this moment, for the report."""
    precision = torch.get_float32_matmul_precision()
    if precision != "highest":
        return "oneDNN" if _error(precision) <= TOLERANCE else "oneDNN, rounded to bfloat16"
    return "MKL" if torch.has_mkl else "BLAS"


def has_onednn() -> bool:
    """Whether this torch was built with oneDNN."""
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def has_bfloat16_units() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware (AVX-512 BF16, AMX, AVX10.2, Arm BF16)."""
    found = torch.cpu.get_capabilities()
    return any(found.get(name) for name in ("avx512_bf16", "amx_bf16", "avx10_2", "bf16", "sve_bf16"))


def require_bfloat16_units(device: torch.device) -> None:
    """``UserError`` on a CPU that would emulate bfloat16: with AVX2 alone, at 0.08 of float32's speed."""
    if device.type == "cpu" and not has_bfloat16_units():
        raise UserError(
            "model.precision=bfloat16: this CPU has no bfloat16 units (avx512_bf16, amx_bf16), so that "
            "training would be up to 12 times slower than in float32. Set model.precision=float32, or insist "
            "with model.emulate_bfloat16=true"
        )
