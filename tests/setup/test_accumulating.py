"""``trainer.accumulate_grad_batches=N``: one update of all parameters, that of a batch N times as large."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import recpipe
from recpipe.data.given import GivenBatches
from recpipe.data.make import open_dataset
from recpipe.errors import UserError
from recpipe.pipeline.placed import PlacedModel
from recpipe.plugin.batch import Batch

SMALL = ("data.samples=1250", "data.tables={a: 40, b: 9}", "model.embedding_dim=4", "model.bottom=[4]")
SMALLER = (*SMALL, "model.top=[8]", "trainer.progress=false", "trainer.backend=plain", "optim=adagrad")
TIERS = ["tiers=ssd", "tiers.policy=lru", "tiers.resident_bytes=60%"]


def trained(*words: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """All parameters after training, and the report."""
    with recpipe.train(None, None, *SMALLER, *words, quiet=True) as run:
        return {k: v.clone() for k, v in run.model.state_dict().items()}, run.report


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize(
    ("tiers", "pooling"),
    [
        pytest.param([], 1, id="resident-1"),
        pytest.param(TIERS, 3, id="ssd-3"),
        # Each way of tables, and each pooling, is held above or does not meet the other.
        pytest.param([], 3, id="resident-3", marks=pytest.mark.soak),
        pytest.param(TIERS, 1, id="ssd-1", marks=pytest.mark.soak),
        pytest.param(["tiers.policy=nocache"], 1, id="nocache-1", marks=pytest.mark.soak),
        pytest.param(["tiers.policy=nocache"], 3, id="nocache-3", marks=pytest.mark.soak),
    ],
)
def test_a_step_of_three_batches_is_that_of_one_three_times_as_large(tiers, pooling) -> None:
    """1,000 samples in batches of 64: the last step has two of them, one of which is short."""
    words = (*tiers, f"data.pooling={pooling}", "trainer.max_epochs=2")
    large, told = trained("data.batch_size=192", *words)
    parts, report = trained("data.batch_size=64", "trainer.accumulate_grad_batches=3", *words)
    alone, _ = trained("data.batch_size=64", *words)
    assert difference(parts, large) < 2e-6
    assert difference(alone, large) > 1e-3, "the control: three updates are others"
    assert report["history"][-1]["step"] == told["history"][-1]["step"] == 12
    assert report["data"]["train_samples"] == told["data"]["train_samples"] == 2000
    assert report["quality"]["logloss"] == pytest.approx(told["quality"]["logloss"], abs=1e-6)


CLIPPED = ("trainer.gradient_clip_val=0.02", "trainer.gradient_clip_over=all")


@pytest.mark.parametrize(
    "words",
    [
        ("optim=adam", "optim.tables.clip_row_norm=0.001", "trainer.gradient_clip_val=0.02"),
        ("optim=sgd", "optim.tables.momentum=0.9", *CLIPPED),
    ],
    ids=["adam-rows", "momentum-all"],
)
def test_state_and_clipping_are_those_of_the_whole_step(words: tuple[str, ...]) -> None:
    """Adam divides by gradients that sums in another order make differ."""
    schedule = "optim.tables.schedule={name: cosine, warmup_steps: 2, decay_steps: 5}"
    words = (*words, *TIERS, "trainer.max_steps=4", schedule)
    large, _ = trained("data.batch_size=192", *words)
    parts, _ = trained("data.batch_size=64", "trainer.accumulate_grad_batches=3", *words)
    plain = [word for word in words if "clip" not in word]
    free, _ = trained("data.batch_size=192", *plain)
    assert difference(parts, large) < 2e-5
    assert difference(free, large) > 1e-4, "the control: clipped they are others"


def test_the_model_sees_no_more_than_a_batch_at_once(monkeypatch) -> None:
    seen: list[int] = []
    train_part = PlacedModel.train_part

    def noted(model: PlacedModel, parts: Any, batch: Batch, share: float) -> torch.Tensor:
        seen.append(len(batch.labels))
        return train_part(model, parts, batch, share)

    monkeypatch.setattr(PlacedModel, "train_part", noted)
    trained("data.batch_size=100", "trainer.accumulate_grad_batches=3", "trainer.split=never")
    assert seen[-10:] == [100] * 10


def test_a_resumed_run_goes_on_in_whole_steps(tmp_path) -> None:
    words = ("data.batch_size=64", "trainer.accumulate_grad_batches=3", *TIERS, f"tiers.dir={tmp_path}")
    whole, _ = trained(*words)
    kept = (f"trainer.checkpoint_dir={tmp_path / 'kept'}", "trainer.checkpoint_every=2")
    trained(*words, *kept, "trainer.max_steps=2")
    rest, report = trained(*words, f"resume={tmp_path / 'kept'}")
    assert report["history"][-1]["step"] == 6
    assert difference(rest, whole) == 0


class Whole(torch.nn.Module):
    """A model whose loss is no mean over samples."""

    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=40, feature_names=["a"])
        self.rows = EmbeddingBagCollection(tables=[config])
        self.norm, self.top = torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        return self.top(self.norm(self.rows(sparse_features).values()))  # type: ignore[no-any-return]


def test_where_it_cannot_be_it_is_refused_in_a_line() -> None:
    words = ("data.batch_size=64", "trainer.accumulate_grad_batches=2")
    with pytest.raises(
        UserError,
        match="accumulate_grad_batches: plugin hotline .*, part hotline.PopularFirst, cuts batches by itself",
    ):
        trained(*words, "+plugin=hotline", *TIERS)
    with pytest.raises(UserError, match="trainer.accumulate_grad_batches=0: must be"):
        trained("trainer.accumulate_grad_batches=0")
    with pytest.raises(UserError, match="trains a step in parts, and this model cannot be: .*BatchNorm"):
        recpipe.train(Whole(), None, *SMALL[:2], "trainer.progress=false", *words, quiet=True)
    data = open_dataset({"name": "synthetic", "samples": 200, "batch_size": 64, "tables": {"a": 40}}, seed=1)
    made = GivenBatches(list(data.batches("train", 64)), (), data.schema)
    with pytest.raises(UserError, match="accumulate_grad_batches=2: the batches handed over are made"):
        recpipe.train(None, made, *SMALLER[2:], words[1], quiet=True)
