"""Which kernels multiply matrices: oneDNN's where they are exact, and nothing left behind."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity

import recpipe
from recpipe.backend import matmul
from recpipe.backend.matmul import float32_matmul, float32_products, require_units
from recpipe.config.compose import compose
from recpipe.errors import UserError
from recpipe.pipeline.placed import PlacedModel
from recpipe.run import run

CPU = torch.device("cpu")
ON_CPU = ("trainer.device=cpu",)
needs_onednn = pytest.mark.skipif(not matmul.has_onednn(), reason="this torch has no oneDNN")


@needs_onednn
def test_products_stay_float32() -> None:
    with float32_products(CPU):
        assert matmul._error(torch.get_float32_matmul_precision()) < matmul.TOLERANCE
        assert float32_matmul() in ("oneDNN", "MKL", "BLAS")
    assert torch.get_float32_matmul_precision() == "highest"


def test_mkl_multiplies_on_intels_own(monkeypatch) -> None:
    monkeypatch.setattr(matmul, "made_by_intel", lambda: True)
    with float32_products(CPU):
        assert float32_matmul() in ("MKL", "BLAS")


@needs_onednn
def test_onednn_is_not_used_where_it_rounds(monkeypatch) -> None:
    monkeypatch.setattr(matmul, "made_by_intel", lambda: False)
    monkeypatch.setattr(matmul, "_error", lambda precision: 2e-3)
    with float32_products(CPU):
        assert torch.get_float32_matmul_precision() == "highest"
        assert float32_matmul() in ("MKL", "BLAS")
    monkeypatch.setattr(matmul, "_error", lambda precision: 2e-7)
    with float32_products(CPU):
        assert float32_matmul() == "oneDNN"


@needs_onednn
@pytest.mark.parametrize(("error", "fused"), [(2e-7, False), (2e-3, True)])
def test_attention_is_fused_where_mkl_multiplies(monkeypatch, error: float, fused: bool) -> None:
    """oneDNN has no small products to make, and what is computed is the same."""
    monkeypatch.setattr(matmul, "made_by_intel", lambda: False)
    monkeypatch.setattr(matmul, "_error", lambda precision: error)
    vectors = torch.randn(3, 4, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    plain = F.scaled_dot_product_attention(*vectors)
    kernel = "aten::_scaled_dot_product_flash_attention_for_cpu"
    with float32_products(CPU), torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiler:
        found = F.scaled_dot_product_attention(*vectors)
    assert any(event.key == kernel for event in profiler.key_averages()) == fused
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)
    assert torch.backends.cuda.flash_sdp_enabled()


@needs_onednn
def test_a_kept_model_scores_with_the_runs_kernels(monkeypatch, tmp_path) -> None:
    seen: list[str] = []
    monkeypatch.setattr(matmul, "made_by_intel", lambda: False)
    monkeypatch.setattr(matmul, "_error", lambda precision: 2e-7)
    monkeypatch.setattr(PlacedModel, "predict", lambda *_: seen.append(torch.get_float32_matmul_precision()))
    words = ("data.samples=300", "data.batch_size=64", "data.table_scale=0.01", "trainer.progress=false")
    with recpipe.train(None, None, *words, *ON_CPU, output=tmp_path, quiet=True) as done:
        done.predict(None)
    assert seen == ["medium"]


def test_a_rounded_product_is_noticed() -> None:
    random = torch.Generator().manual_seed(0)
    left, right = torch.randn(256, 512, generator=random), torch.randn(512, 256, generator=random)
    exact = left.double() @ right.double()
    rounded = (left.bfloat16() @ right.bfloat16()).double()
    assert (rounded - exact).norm() / exact.norm() > 10 * matmul.TOLERANCE


def test_the_users_choice_and_gpus_are_left_alone() -> None:
    torch.set_float32_matmul_precision("high")
    try:
        with float32_products(CPU):
            assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    with float32_products(torch.device("cuda")):
        assert torch.get_float32_matmul_precision() == "highest"


def test_a_cpu_without_bfloat16_units_is_refused(monkeypatch, tmp_path) -> None:
    """Before any data are read; a GPU and a CPU with units are not, and a user can insist."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_bf16": False})
    recipe = ["model.precision=bfloat16", "data.samples=300", "data.batch_size=64", "data.table_scale=0.01"]
    with pytest.raises(UserError, match=r"this CPU has no bfloat16 units .* model.emulate_bfloat16=true"):
        run(compose(["model.precision=bfloat16", "data=criteo", "data.path=nowhere"]), tmp_path)
    assert run(compose([*recipe, "model.emulate_bfloat16=true"]), tmp_path)["altered"] == ["EXACT_GRADIENT"]
    require_units("bfloat16", torch.device("cuda"))
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    require_units("bfloat16", CPU)


def test_tf32_is_a_gpus_alone(monkeypatch, tmp_path) -> None:
    """Before any data are read."""
    for device in (CPU, torch.device("cuda")):
        before = torch.get_float32_matmul_precision()
        with float32_products(device, "tf32"):
            assert (torch.get_float32_matmul_precision() == "high") == (device.type == "cuda")
        assert torch.get_float32_matmul_precision() == before
    with pytest.raises(UserError, match="a CPU has no units for TF32.*model.precision=float32"):
        run(compose(["model.precision=tf32", "data=criteo", "data.path=nowhere", *ON_CPU]), tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(UserError, match="this Tesla T4 has no units for TF32"):
        require_units("tf32", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    require_units("tf32", torch.device("cuda"))
