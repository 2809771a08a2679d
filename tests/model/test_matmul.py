"""Which kernels multiply matrices: oneDNN's where they are exact, and nothing left behind."""

from __future__ import annotations

import logging

import pytest
import torch

from recpipe.model import matmul
from recpipe.model.matmul import float32_matmul, vector_units, warn_without_units

CPU = torch.device("cpu")
needs_onednn = pytest.mark.skipif(not matmul.has_onednn(), reason="this torch has no oneDNN")


@needs_onednn
def test_products_stay_float32() -> None:
    with vector_units(CPU):
        assert matmul._error() < matmul.TOLERANCE
        assert float32_matmul() in ("oneDNN", "MKL", "BLAS")
    assert torch.get_float32_matmul_precision() == "highest"


@needs_onednn
def test_onednn_is_not_used_where_it_rounds(monkeypatch) -> None:
    monkeypatch.setattr(matmul, "_error", lambda: 2e-3)
    with vector_units(CPU):
        assert torch.get_float32_matmul_precision() == "highest"
        assert float32_matmul() in ("MKL", "BLAS")
    monkeypatch.setattr(matmul, "_error", lambda: 2e-7)
    with vector_units(CPU):
        assert float32_matmul() == "oneDNN"


def test_a_rounded_product_is_noticed() -> None:
    random = torch.Generator().manual_seed(0)
    left, right = torch.randn(256, 512, generator=random), torch.randn(512, 256, generator=random)
    exact = left.double() @ right.double()
    rounded = (left.bfloat16() @ right.bfloat16()).double()
    assert (rounded - exact).norm() / exact.norm() > 10 * matmul.TOLERANCE


def test_the_users_choice_and_gpus_are_left_alone() -> None:
    torch.set_float32_matmul_precision("high")
    try:
        with vector_units(CPU):
            assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    with vector_units(torch.device("cuda")):
        assert torch.get_float32_matmul_precision() == "highest"


def test_a_cpu_without_bfloat16_units_is_told(monkeypatch, caplog) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_bf16": False})
    with caplog.at_level(logging.WARNING, logger="recpipe"):
        warn_without_units("float32", CPU)
        assert not caplog.messages
        warn_without_units("bfloat16", CPU)
    assert "this CPU has no bfloat16 units" in caplog.text
    assert "model.precision=float32" in caplog.text
    caplog.clear()
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    warn_without_units("bfloat16", CPU)
    assert not caplog.messages
