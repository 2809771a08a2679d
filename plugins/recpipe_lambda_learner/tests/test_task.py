"""task=lambda from a file whose users change their habits after training."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from recpipe_lambda_learner.rows import rows_file
from safetensors.numpy import load_file

from recpipe.answers.effects import ABOUT, newest_effects
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
