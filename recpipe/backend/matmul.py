"""Selects kernels that multiply matrices with the vector units of any maker's CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from recpipe.backend.host import made_by_intel
from recpipe.errors import UserError

TOLERANCE = 1e-5
"""Largest accepted error relative to the product's norm: float32 kernels are below 1e-6, bfloat16's are at
1e-3."""


@contextmanager
def vector_units(device: torch.device) -> Iterator[None]:
    """In the block, oneDNN multiplies float32 matrices on CPUs that Intel did not make.

    On those, MKL takes its AVX2 path, at half the speed of AVX-512. On Intel's CPUs it is up to a third
    faster than oneDNN at a few hundred samples. torch passes float32 products to oneDNN under the precision
    "medium", which also permits bfloat16, and oneDNN may use that if the CPU has units for it. So one product
    is computed and compared; if it was rounded, MKL stays. A precision set by the user, and products on a
    GPU, are not changed.
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
    """The error of a float32 product relative to the norm of the float64 one, under ``precision``."""
    random = torch.Generator().manual_seed(0)
    left, right = (torch.randn(shape, generator=random) for shape in ((256, 512), (512, 256)))
    exact = left.double() @ right.double()
    return float((left @ right - exact).norm() / exact.norm())


def float32_matmul() -> str:
    """The library that multiplies float32 matrices on the CPU now, for the report."""
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
    """``UserError`` on a CPU that would emulate bfloat16; with only AVX2 that has 0.08 of float32's speed."""
    if device.type == "cpu" and not has_bfloat16_units():
        raise UserError(
            "model.precision=bfloat16: this CPU has no bfloat16 units (avx512_bf16, amx_bf16), so that "
            "training would be up to 12 times slower than in float32. Set model.precision=float32, or insist "
            "with model.emulate_bfloat16=true"
        )
