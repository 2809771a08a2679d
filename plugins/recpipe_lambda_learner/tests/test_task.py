"""task=lambda from a file whose users change their habits after training."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from recpipe_lambda_learner.effects import EffectConfig
from recpipe_lambda_learner.events import Reader
from recpipe_lambda_learner.online import Learner
from recpipe_lambda_learner.rows import rows_file
from safetensors.numpy import load_file

import recpipe
from recpipe.answers.effects import ABOUT, newest_effects
from recpipe.answers.score import Scorer, bags_of
from recpipe.answers.trained import open_trained
from recpipe.config.compose import compose
from recpipe.errors import UserError
from recpipe.run import run

USERS, BEFORE, AFTER = 50, 2000, 2000


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half of the users click mostly, then the other half."""
    rng = np.random.default_rng(0)
    size = BEFORE + AFTER
    user = rng.integers(0, USERS, size)
    liked = (user < USERS / 2) ^ (np.arange(size) >= BEFORE)
    path = tmp_path_factory.mktemp("data") / "clicks.parquet"
    columns = {
        "click": (rng.random(size) < np.where(liked, 0.8, 0.1)).astype(np.int64),
        "user": user,
        "item": rng.integers(0, 20, size),
        "price": rng.normal(size=size),
    }
    pq.write_table(pa.table(columns), path)
    return path


def words(path: Path, *more: str) -> list[str]:
    features = (
        "{labels: [click], features: [{name: user, rows: 5000}, {name: item, rows: 3000}, "
        "{name: price, kind: dense, scale: standard}]}"
    )
    return [
        *("task=lambda", "data=files", f"data.path={path}", f"data.features={features}"),
        *("data.eval_fraction=0.5", "data.batch_size=100", "optim=rowwise_adagrad", "lambda.batch_size=200"),
        *("trainer.backend=plain", f"data.cache_dir={path.parent}", *more),
    ]


def told(directory: Path, *arguments: str) -> dict:
    run(compose([*arguments]), directory)
    return json.loads((directory / "lambda.json").read_text())


def auc(found: dict, curve: str, window: int = -1) -> float:
    return found["curves"][curve][window]["auc"]["value"]


def test_effects_follow_what_the_frozen_model_cannot(clicks: Path, tmp_path: Path) -> None:
    effects = (
        "lambda.effects=[{entity: user, inputs: [intercept]}, {entity: item, inputs: [intercept, price]}]"
    )
    found = told(tmp_path / "one", *words(clicks, effects, "lambda.retrain_every=4"))
    assert found["events"] == AFTER
    assert found["mini_batches"] == AFTER / 200
    assert found["entities"] == {"user": USERS, "item": 20}
    assert found["unsettled"] == 0
    assert auc(found, "frozen") < 0.3
    assert auc(found, "lambda") > 0.6
    assert auc(found, "lambda", -2) > 0.75
    first = found["curves"]["frozen"][0]
    assert (first["first"], first["end"]) == (0, AFTER // 5)
    assert auc(found, "frozen") < auc(found, "retrained") < auc(found, "lambda")
    assert auc(found, "retrained, lambda") > auc(found, "retrained")
    # No jump where a new model takes over: what is said of the next events is no worse. By the new model
    # alone it would be.
    assert [own["mini_batch"] for own in found["changes"]] == [4, 8]
    for own in found["changes"]:
        assert own["moved"]["after"] < own["moved"]["after, alone"]
        assert own["logloss"]["after"] < own["logloss"]["before"] + 0.02
        assert own["logloss"]["after, alone"] > own["logloss"]["before"] + 0.05
    directory, learnt = newest_effects(tmp_path / "one")
    assert learnt.number == AFTER / 200
    assert load_file(rows_file(directory, "item"))["means"].shape == (20 + 2, 2)

    # Broken off after some mini-batches, it goes on as if it had not been.
    checkpoint = f"lambda.checkpoint={tmp_path / 'one'}"
    half = [checkpoint, "lambda.save_every=2", "trainer.limit_val_batches=5"]
    told(tmp_path / "half", *words(clicks, effects, *half))
    rest = told(tmp_path / "rest", *words(clicks, effects, f"lambda.resume={tmp_path / 'half'}"))
    assert rest["curves"]["lambda"] == found["curves"]["lambda"]
    for file in newest_effects(tmp_path / "rest")[0].iterdir():
        if file.name != ABOUT:
            assert file.read_bytes() == (directory / file.name).read_bytes(), file.name

    # A finished model, and nothing that learns: curves are the frozen model's.
    still = told(tmp_path / "two", *words(clicks, effects, checkpoint, "lambda.ridge=1e12", "lambda.keep=0"))
    assert auc(still, "frozen") == auc(found, "frozen")
    assert auc(still, "lambda") == pytest.approx(auc(found, "frozen"), abs=1e-6)

    inputs = "lambda.effects=[{entity: user, inputs: [last_layer, item]}]"
    by_model = told(tmp_path / "three", *words(clicks, inputs, checkpoint, "lambda.precision=diagonal"))
    assert auc(by_model, "lambda") > 0.6

    for wrong, words_of in {
        "lambda.effects=[{entity: usr, inputs: [intercept]}]": r"no sparse column 'usr'; .*user",
        "lambda.effects=[{entity: user, inputs: [prise]}]": r"'prise' is no input of user's effect; .*price",
        "lambda.effects=[]": "lambda.effects",
        f"lambda.resume={tmp_path / 'half'}": "has learnt with lambda.effects=",
        f"lambda.resume={tmp_path}": "no coefficients of entities",
        "lambda.effects=[{entity: user, inputs: []}]": r"lambda.effects\[0\].inputs",
    }.items():
        with pytest.raises(UserError, match=words_of):
            told(tmp_path / "wrong", *words(clicks, checkpoint, inputs, wrong))


@pytest.mark.soak
def test_a_package_sees_and_adds_what_the_task_does_bit_for_bit(clicks: Path, tmp_path: Path) -> None:
    """``test_online`` holds that of the scorer without compiled code."""
    effects = "lambda.effects=[{entity: user, inputs: [intercept, item]}, {entity: item, inputs: [price]}]"
    told(tmp_path / "run", *words(clicks, effects))
    given: dict[str, Any] = {"effects": tmp_path / "run", "reference": False, "quiet": True}
    package = recpipe.package(tmp_path / "run", tmp_path / "m.recpipe", **given)
    again = recpipe.package(package, tmp_path / "again.recpipe", reference=False, quiet=True)
    scorer, trained = Scorer(package), open_trained(tmp_path / "run", ["data.batch_size=200"])
    config = [EffectConfig("user", ["intercept", "item"]), EffectConfig("item", ["price"])]
    learner = Learner(package, None, 10, 3600)
    with trained.scoring() as scoring:
        batches = list(islice(trained.dataset.batches("eval", 200), 3))
        for batch, own in zip(batches, Reader(trained, config).read(scoring, batches), strict=True):
            ids = batch.sparse
            found = scorer(batch.dense, ids.values(), ids.lengths())
            bags = bags_of(ids.values(), ids.values(), ids.lengths().view(2, -1), None)
            assert scorer.effects is not None
            for (keys, inputs), seen in zip(scorer.effects.seen(batch.dense, bags), own.seen, strict=True):
                np.testing.assert_array_equal(keys.numpy(), seen.entities)
                np.testing.assert_array_equal(inputs.numpy(), seen.inputs)
            corrected, scorer.effects = scorer.effects, None
            alone = scorer(batch.dense, ids.values(), ids.lengths()).double().numpy()
            scorer.effects = corrected
            wanted = learner.logits(own.seen, alone).astype(np.float32)
            np.testing.assert_array_equal(found.numpy(), wanted)
            np.testing.assert_allclose(alone, own.offsets, atol=1e-5)
            assert np.abs(alone - found.numpy()).max() > 0.1
            assert torch.equal(Scorer(again)(batch.dense, ids.values(), ids.lengths()), found)
    other = told(tmp_path / "other", *words(clicks, effects, "seed=7"))
    assert other["events"] == AFTER
    with pytest.raises(UserError, match="these coefficients correct"):
        recpipe.package(tmp_path / "other", tmp_path / "wrong", **given)
