"""bfloat16 in the dense part's matrix products: near float32, weights and gradients still float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import recpipe
from recpipe.answers.parts import tolerance
from recpipe.backend import matmul
from recpipe.config.compose import compose
from recpipe.config.recipe import Recipe
from recpipe.data.schema import Schema
from recpipe.errors import UserError
from recpipe.model.config import ModelConfig
from recpipe.pipeline.placed import PlacedModel
from recpipe.run import run
from recpipe.tables.resident import ResidentCollection
from tests.pipeline.samples import random_batch
from tests.placing import model_over
from tests.tables.samples import CPU, FEATURES, table_set

SMALL = (
    "data.samples=3000",
    "data.batch_size=128",
    "data.table_scale=0.01",
    "trainer.progress=false",
    "trainer.logger=null",
    "trainer.device=cpu",
)


def placed(precision: str) -> PlacedModel:
    config = ModelConfig("dlrm", 8, [16], [16], precision=precision)
    schema = Schema(tuple("xyz"), FEATURES)
    return model_over(ResidentCollection(table_set(), CPU), schema, config, seed=1)


def test_logits_are_float32_and_near() -> None:
    plain, low = placed("float32"), placed("bfloat16")
    batch = random_batch(np.random.default_rng(1), 64, multi=True)
    exact, rounded = plain(batch), low(batch)
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, exact, rtol=0.05, atol=0.05)
    assert not torch.equal(rounded, exact), "the products were made in bfloat16"
    low.called(batch)[0].backward()
    gradients = [p.grad for p in low.dense_parameters().values()]
    assert all(g is not None and g.dtype == torch.float32 for g in gradients)


def test_a_run_declares_it(tmp_path: Path) -> None:
    recipe = [*SMALL, "trainer.checkpoint_every=null"]
    exact = run(compose(recipe), tmp_path / "exact")
    low = run(compose([*recipe, "model.precision=bfloat16", "model.emulate_bfloat16=true"]), tmp_path / "low")
    assert exact["altered"] == []
    assert low["altered"] == ["EXACT_GRADIENT"]
    assert low["quality"]["logloss"] == pytest.approx(exact["quality"]["logloss"], abs=5e-3)
    assert low["quality"] != exact["quality"]


def test_what_was_trained_in_tf32_is_scored_in_float32_on_a_cpu(tmp_path: Path, monkeypatch) -> None:
    """A checkpoint of a GPU; of this one only the recipe says so."""
    with monkeypatch.context() as on_gpu:
        on_gpu.setattr(matmul, "_has_tf32_units", lambda device: True)
        report = run(compose([*SMALL, "model.precision=tf32", "trainer.checkpoint_every=1.0"]), tmp_path)
    assert report["altered"] == ["EXACT_GRADIENT"]
    found = recpipe.evaluate(tmp_path, None, "split=eval", quiet=True)
    loss = found["tasks"]["score"]["figures"]["logloss"]["value"]
    assert loss == pytest.approx(report["quality"]["logloss"], abs=1e-6)
    scores = torch.tensor([0.5, 3.0])  # a package's are held to what it has of float32
    assert tolerance(scores, "tf32") == tolerance(scores, "float32")


def test_other_precisions_are_refused() -> None:
    told = "model.precision=fp8 is unknown; choose one of float32, tf32, bfloat16"
    with pytest.raises(UserError, match=told):
        Recipe.of(compose(["model.precision=fp8"]))
