"""The interaction of a DLRM as a GPU trains it, against TorchRec's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torchrec.models.dlrm import InteractionArch

from recpipe.backend import convert as back
from recpipe.backend.convert import convert_on_gpu, revert
from recpipe.config.compose import compose
from recpipe.run import run
from tests.backend.test_dense import leave_out_mirror_images
from tests.gpu.test_runs import SMALL
from tests.training.test_trainer import furthest, parameters

pytestmark = pytest.mark.cuda
BATCH, FEATURES, DIM = 37, 5, 8


def made(device: torch.device, converted: bool) -> InteractionArch:
    arch = InteractionArch(FEATURES).to(device)
    if converted:
        convert_on_gpu(arch)
    return arch


def passes(device: torch.device, converted: bool, bfloat16: bool = False) -> list[torch.Tensor]:
    """The output, and both inputs' gradients, of one batch."""
    torch.manual_seed(3)
    bottom = torch.randn(BATCH, DIM, device=device, requires_grad=True)
    rows = torch.randn(BATCH, FEATURES, DIM, device=device, requires_grad=True)
    kind = torch.bfloat16 if bfloat16 else torch.float32
    with torch.autocast("cuda", torch.bfloat16, enabled=bfloat16):
        out = made(device, converted)(bottom.to(kind), rows)
    assert out.dtype == kind
    found = torch.autograd.grad(out, (bottom, rows), torch.randn_like(out))
    return [value.float() for value in (out.detach(), *found)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each interaction of the back end."""
    seen, interact = list[int](), back.interact

    def counted(*arguments: object) -> torch.Tensor:
        seen.append(1)
        return interact(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(back, "interact", counted)
    return seen


def test_products_and_gradients_are_torchrecs(device: torch.device, calls: list[int]) -> None:
    for mine, theirs in zip(passes(device, True), passes(device, False), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert len(calls) == 1


def test_a_missing_mirror_image_shows(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out_mirror_images(monkeypatch)
    assert not torch.allclose(passes(device, True)[2], passes(device, False)[2], atol=1e-3)


def test_bfloat16_rounds_no_more_than_torchrecs(device: torch.device, calls: list[int]) -> None:
    exact = passes(device, False)
    mine, theirs = passes(device, True, bfloat16=True), passes(device, False, bfloat16=True)
    assert len(calls) == 1
    for low, other, value in zip(mine, theirs, exact, strict=True):
        errors = [float((found - value).norm() / value.norm()) for found in (low, other)]
        assert 1e-5 < errors[0] < 1.5 * errors[1]


def test_other_calls_are_the_modules_own(device: torch.device, calls: list[int]) -> None:
    arch = made(device, True)
    arch(torch.randn(0, DIM, device=device), torch.randn(0, FEATURES, DIM, device=device))
    arch(*(torch.randn(*size, device=device).half() for size in ((BATCH, DIM), (BATCH, FEATURES, DIM))))
    revert(arch)
    arch(torch.randn(BATCH, DIM, device=device), torch.randn(BATCH, FEATURES, DIM, device=device))
    assert not calls


def test_gradients_can_be_differentiated(device: torch.device) -> None:
    found = []
    for converted in (True, False):
        torch.manual_seed(4)
        bottom = torch.randn(BATCH, DIM, device=device, requires_grad=True)
        rows = torch.randn(BATCH, FEATURES, DIM, device=device, requires_grad=True)
        out = made(device, converted)(bottom, rows)
        (first,) = torch.autograd.grad((out**2).sum(), rows, create_graph=True)
        found.append(torch.autograd.grad((first**2).sum(), bottom)[0])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("backend", ["auto", "cpu"])
def test_a_run_uses_it_unless_its_modules_stay_plain(
    tmp_path: Path, calls: list[int], caplog: pytest.LogCaptureFixture, backend: str
) -> None:
    left = {}
    caplog.set_level("INFO", "recpipe")
    for name in (backend, "plain"):
        caplog.clear()
        folder = tmp_path / name
        words = (f"trainer.backend={name}", f"task.export_parameters={folder}/parameters")
        run(compose([*SMALL, "optim=sgd", "task.page=false", "tiers.policy=lru", *words]), folder)
        left[name] = parameters(folder / "parameters")
        assert bool(calls) == (name != "plain")
        assert ("cuda_graph may be faster" in caplog.text) == (name == "auto"), "said to who has not chosen"
        calls.clear()
    assert furthest(left[backend], left["plain"]) < 1e-5
