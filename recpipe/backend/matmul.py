"""Selects what multiplies float32 matrices: the vector units of any maker's CPU, or a GPU's matrix units."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from recpipe.backend.choices import made_by_intel
from recpipe.errors import UserError

TF32 = "tf32"
"""``model.precision`` of float32 products whose factors a GPU rounds to 10 bits."""
TOLERANCE = 1e-5
"""Largest accepted error relative to the product's norm: float32 kernels are below 1e-6, bfloat16's are at
1e-3."""


@contextmanager
def float32_products(device: torch.device, precision: str = "float32") -> Iterator[None]:
    """In the block, float32 matrices are multiplied as fast as ``precision`` (``model.precision``) permits.

    "tf32": a GPU's matrix units round the factors to 10 bits and add up in float32; a CPU computes in float32
    all the same. A precision that the user has set is not changed otherwise, and neither are products on a
    GPU.
    """
    before = torch.get_float32_matmul_precision()
    chosen = None
    if device.type == "cuda" and precision == TF32:
        chosen = "high"
    elif device.type == "cpu" and before == "highest" and has_onednn() and not made_by_intel():
        # MKL takes its AVX2 path on CPUs that Intel did not make, at half the speed of AVX-512, or at nine
        # tenths where that computes in two halves; on Intel's it is up to a third faster than oneDNN at a few
        # hundred samples. torch passes float32 products to
        # oneDNN under "medium", which also permits bfloat16, and oneDNN may use that if the CPU has units for
        # it. So one product is computed and compared; if it was rounded, MKL stays.
        chosen = "medium"
    if chosen is None:
        yield
        return
    fused = torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.set_float32_matmul_precision(chosen)
    try:
        if device.type == "cpu":
            if _error(chosen) > TOLERANCE:
                torch.set_float32_matmul_precision(before)
            else:
                # torch's fused attention on a CPU, which has this switch, too, multiplies a sample's and a
                # head's few vectors at a time. By oneDNN that takes 7 to 14 times as long for histories of
                # 20 to 40 events, and twice as long for 200; products of all samples at once do not.
                torch.backends.cuda.enable_flash_sdp(False)
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cuda.enable_flash_sdp(fused)


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


def require_units(precision: str, device: torch.device, emulate_bfloat16: bool = False) -> None:
    """``UserError`` if ``device`` has no units for ``precision``.

    A CPU would emulate bfloat16; with AVX2 alone that has 0.08 of float32's speed. tf32 would do nothing.
    """
    if precision == "bfloat16" and not emulate_bfloat16 and device.type == "cpu" and not has_bfloat16_units():
        raise UserError(
            "model.precision=bfloat16: this CPU has no bfloat16 units (avx512_bf16, amx_bf16), so that "
            "training would be up to 12 times slower than in float32. Set model.precision=float32, or insist "
            "with model.emulate_bfloat16=true"
        )
    if precision == TF32 and not _has_tf32_units(device):
        here = "a CPU" if device.type == "cpu" else f"this {torch.cuda.get_device_name(device)}"
        raise UserError(
            f"model.precision=tf32: {here} has no units for TF32, which NVIDIA's GPUs have since the A100 "
            "(compute capability 8.0). Set model.precision=float32"
        )


def _has_tf32_units(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
