"""bfloat16 in the dense part's matrix products: near float32, weights and gradients still float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from recpipe.model.ranker import ModelConfig, Ranker

from recpipe.config import compose
from recpipe.embedding.resident import ResidentCollection
from recpipe.errors import UserError
from recpipe.recipe import Recipe
from recpipe.run import run
from tests.embedding.samples import CPU, FEATURES, table_set

CONFIG = ModelConfig("dlrm", 8, [16], [16])


def ranker(precision: str) -> Ranker:
    torch.manual_seed(1)
    return Ranker(replace(CONFIG, precision=precision), ResidentCollection(table_set(), CPU), 4, CPU)


def test_logits_are_float32_and_near() -> None:
    plain, low = ranker("float32"), ranker("bfloat16")
    dense, pooled = torch.randn(64, 4), torch.randn(64, len(FEATURES) * 8)
    exact, rounded = plain.score(dense, pooled), low.score(dense, pooled)
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, exact, rtol=0.05, atol=0.05)
    assert not torch.equal(rounded, exact), "the products were made in bfloat16"
    rounded.sum().backward()
    gradients = [p.grad for p in low.dense_parameters().values()]
    assert all(g is not None and g.dtype == torch.float32 for g in gradients)


def test_a_run_declares_it(tmp_path: Path) -> None:
    recipe = ["data.samples=3000", "data.batch_size=128", "data.table_scale=0.01", "trainer.progress=false"]
    recipe += ["trainer.checkpoint_every=null", "trainer.logger=null"]
    exact = run(compose(recipe), tmp_path / "exact")
    low = run(compose([*recipe, "model.precision=bfloat16", "model.emulate_bfloat16=true"]), tmp_path / "low")
    assert exact["altered"] == []
    assert low["altered"] == ["EXACT_GRADIENT"]
    assert low["quality"]["logloss"] == pytest.approx(exact["quality"]["logloss"], abs=5e-3)
    assert low["quality"] != exact["quality"]


def test_other_precisions_are_refused() -> None:
    with pytest.raises(UserError, match="model.precision=fp8 is unknown; choose one of float32, bfloat16"):
        Recipe.of(compose(["model.precision=fp8"]))
