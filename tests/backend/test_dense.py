"""The dense part's own forward and backward passes against TorchRec's modules."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from recpipe.model.ranker import ModelConfig, Ranker

from recpipe.backend import dense
from recpipe.embedding.resident import ResidentCollection
from tests.embedding.samples import CPU, FEATURES, table_set

DIM, BATCH = 8, 37
CONFIG = ModelConfig("dlrm", DIM, [16, 12], [24, 16])


def ranker(name: str = "dlrm", precision: str = "float32", dense_features: int = 4) -> Ranker:
    torch.manual_seed(1)
    config = replace(CONFIG, name=name, precision=precision)
    made = Ranker(config, ResidentCollection(table_set(), CPU), dense_features, CPU)
    assert made.fused
    return made


def step(
    made: Ranker, fused: bool, room: bool = False, features: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Logits and all gradients of one batch; those of pooled rows without the room in front."""
    made.fused = fused
    torch.manual_seed(2)
    drawn, pooled = torch.randn(BATCH, 4), torch.randn(BATCH, len(FEATURES) * DIM)
    features = drawn if features is None else features
    if room:
        pooled = torch.cat((torch.zeros(BATCH, DIM), pooled), dim=1)
    pooled.requires_grad_()
    made.zero_grad()
    logits = made.score(features, pooled)
    (logits * torch.randn(BATCH)).sum().backward()
    assert pooled.grad is not None
    found = {name: p.grad for name, p in made.dense_parameters().items()}
    return {"logits": logits.detach(), "pooled": pooled.grad[:, room * DIM :], **found}


@pytest.mark.parametrize(("name", "room"), [("dlrm", False), ("dlrm", True), ("dlrm_dcn", False)])
def test_logits_and_gradients_are_those_of_the_modules(name, room) -> None:
    made = ranker(name)
    expected, found = step(made, fused=False), step(made, fused=True, room=room)
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=2e-6, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["dlrm", "dlrm_dcn"])
def test_without_dense_features_the_bottom_mlp_has_a_constant(name, fused) -> None:
    """Logits and gradients are those of TorchRec's modules over a dense column of ones."""
    expected = step(ranker(name, dense_features=1), fused=False, features=torch.ones(BATCH, 1))
    made = ranker(name, dense_features=0)
    found = step(made, fused=fused, features=torch.empty(BATCH, 0))
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=4e-6, msg=lambda m, k=key: f"{k}: {m}")
    with_dense = ranker(name, dense_features=1)
    assert made.dense_flops < with_dense.dense_flops, "the bottom MLP runs once for a batch"


def test_a_wrong_mirror_image_is_noticed(monkeypatch) -> None:
    made = ranker()
    expected = step(made, fused=False)
    with monkeypatch.context() as patch:
        right = dense._symmetric
        patch.setattr(dense, "_symmetric", lambda count, dim: upper_alone_of(right, count, dim))
        found = step(made, fused=True)
    assert not torch.allclose(found["pooled"], expected["pooled"], atol=1e-3)


def upper_alone_of(right, count: int, dim: int) -> torch.Tensor:
    """Products whose mirror images get no gradient."""
    where = right(count, dim).view(count, count).clone()
    row, column = torch.tril_indices(count, count, offset=-1)
    where[row, column] = int(where[0, 0])
    return where.view(-1)


def test_bfloat16_rounds_no_more_than_autocast_and_gradients_are_float32() -> None:
    exact = step(ranker(), fused=True)
    low, autocast = (step(ranker(precision="bfloat16"), fused=fused) for fused in (True, False))
    for key, value in exact.items():
        assert low[key].dtype == torch.float32
        error, theirs = ((found[key] - value).norm() / value.norm() for found in (low, autocast))
        assert 1e-5 < error < 2 * theirs, f"{key}: {error} here, {theirs} by autocast"


@pytest.mark.parametrize("part", ["dense_arch", "over_arch"])
def test_a_weight_that_is_no_number_reaches_the_loss(part) -> None:
    made = ranker()
    name = next(n for n in made.dense_parameters() if n.startswith(part))
    made.dense_parameters()[name].data.fill_(float("nan"))
    logits = made.score(torch.randn(3, 4), torch.randn(3, len(FEATURES) * DIM))
    assert logits.isnan().all(), "ReLU must not make zeros of it"


def test_the_room_is_the_dense_vectors_alone() -> None:
    made = ranker()
    batch_of_rows = torch.randn(5, (1 + len(FEATURES)) * DIM)
    before = batch_of_rows.clone()
    made.score(torch.randn(5, 4), batch_of_rows)
    assert torch.equal(before[:, DIM:], batch_of_rows[:, DIM:])
    assert not torch.equal(before[:, :DIM], batch_of_rows[:, :DIM])
