"""The dense part's own forward and backward passes, at what only they do."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchrec.models.dlrm import DLRM

from recpipe.backend import dense
from recpipe.backend.convert import convert
from recpipe.model.dlrm import DlrmSizes, make_dlrm

DIM, BATCH, FEATURES = 8, 37, 3
TABLES = [("a", 10), ("b", 600), ("c", 90)]


def model(converted: bool) -> DLRM:
    torch.manual_seed(1)
    made = make_dlrm(DlrmSizes("dlrm", DIM, [16, 12], [24, 16], 1, 1, 4, TABLES), torch.device("cpu"))
    if converted:
        convert(made)
    return made


def score(made: DLRM, features: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
    return made.over_arch(made.inter_arch(made.dense_arch(features), pooled))


def step(made: DLRM, bfloat16: bool = False) -> dict[str, torch.Tensor]:
    """Logits and all gradients of one batch."""
    torch.manual_seed(2)
    features = torch.randn(BATCH, 4)
    pooled = torch.randn(BATCH, FEATURES, DIM, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        logits = score(made, features, pooled).float()
    (logits.squeeze(1) * torch.randn(BATCH)).sum().backward()
    assert pooled.grad is not None
    dense_part = {n: p.grad for n, p in made.named_parameters() if not p.is_meta}
    return {"logits": logits.detach(), "pooled": pooled.grad, **dense_part}


def test_logits_and_gradients_are_those_of_the_modules() -> None:
    expected, found = step(model(converted=False)), step(model(converted=True))
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=2e-6, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("bfloat16", [False, True])
def test_logits_without_gradients_have_the_same_bits(bfloat16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, made = step(model(converted=True), bfloat16)["logits"], model(converted=True)
    torch.manual_seed(2)
    features, pooled = torch.randn(BATCH, 4), torch.randn(BATCH, FEATURES, DIM)
    for function in (dense._Chain, dense._Interaction):  # they are for gradients alone
        monkeypatch.setattr(function, "apply", None)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        assert score(made, features, pooled).float().equal(expected)


def leave_out_mirror_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on products' mirror images get no gradient of their own."""
    right = dense._symmetric

    def upper_alone(count: int, dim: int, device: torch.device) -> torch.Tensor:
        where = right(count, dim, device).view(count, count).clone()
        row, column = torch.tril_indices(count, count, offset=-1)
        where[row, column] = int(where[0, 0])
        return where.view(-1)

    monkeypatch.setattr(dense, "_symmetric", upper_alone)


def test_a_wrong_mirror_image_is_noticed(monkeypatch) -> None:
    expected = step(model(converted=False))
    leave_out_mirror_images(monkeypatch)
    assert not torch.allclose(step(model(converted=True))["pooled"], expected["pooled"], atol=1e-3)


def test_bfloat16_rounds_no_more_than_autocast_and_gradients_are_float32() -> None:
    exact = step(model(converted=True))
    low, autocast = (step(model(converted), bfloat16=True) for converted in (True, False))
    for key, value in exact.items():
        assert low[key].dtype == torch.float32
        error, theirs = ((found[key] - value).norm() / value.norm() for found in (low, autocast))
        assert 1e-5 < error < 2 * theirs, f"{key}: {error} here, {theirs} by autocast"


@pytest.mark.parametrize("part", ["dense_arch", "over_arch"])
def test_a_weight_that_is_no_number_reaches_the_loss(part) -> None:
    made = model(converted=True)
    weight = next(p for n, p in made.named_parameters() if n.startswith(part))
    nn.init.constant_(weight, float("nan"))
    assert score(made, torch.randn(3, 4), torch.randn(3, FEATURES, DIM)).isnan().all(), "no zeros of NaN"
