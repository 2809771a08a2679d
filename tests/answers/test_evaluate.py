"""A checkpoint evaluated: training's own figures to the last digit, on any data, and slices of it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

import recpipe
from recpipe import cli
from recpipe.answers.trained import open_trained
from recpipe.checkpoint.manifest import TRAINER, seal
from recpipe.checkpoint.table_io import RECIPE, load_trainer, newest, save_trainer
from recpipe.data.dataset import SplitName
from recpipe.data.make import open_dataset
from recpipe.errors import DataError, UserError
from tests.answers.answers import PLAIN, ROWS, SMALL, Answers, clicks, put, trained


def figures(content: dict, task: str = "score") -> dict[str, float]:
    return {name: found["value"] for name, found in content["tasks"][task]["figures"].items()}


def altered(answers: Answers, folder: Path, change) -> Path:
    """A copy of the run's newest checkpoint whose trainer.pt is ``change``d."""
    copied = Path(shutil.copytree(newest(answers.folder), folder / "copy"))
    trainer = load_trainer(copied / TRAINER)
    change(trainer)
    save_trainer(trainer, copied / TRAINER)
    (copied / "MANIFEST.json").unlink()
    seal(copied, trainer["global_step"])
    return copied


# -- the same figures as training's ------------------------------------------------------------


@pytest.mark.parametrize(
    "tiers", [(), ("tiers.store=ssd", "tiers.resident_bytes=10%")], ids=["resident", "ssd"]
)
def test_the_held_out_part_has_the_figures_of_the_report(answers: Answers, tiers: tuple[str, ...]) -> None:
    found = figures(recpipe.evaluate(answers.folder, None, "split=eval", *tiers, quiet=True))
    for name in ("auc", "logloss", "ne"):
        assert found[name] == answers.report["quality"][name], name


def test_other_rows_and_other_weights_have_other_figures(answers: Answers, tmp_path: Path) -> None:
    """What would make the test above pass by chance."""
    whole = recpipe.evaluate(answers.folder, quiet=True)
    assert whole["data"]["samples"] == ROWS
    assert figures(whole)["auc"] != answers.report["quality"]["auc"]

    def nudge(trainer: dict) -> None:
        name = next(name for name in trainer["state_dict"] if name.endswith("weight"))
        trainer["state_dict"][name] *= 1.01

    other = recpipe.evaluate(altered(answers, tmp_path, nudge), None, "split=eval", quiet=True)
    assert figures(other)["auc"] != answers.report["quality"]["auc"]


@pytest.mark.parametrize(
    "words",
    [
        ("tiers.sharded=true",),
        ("+plugin=hotline", "tiers.resident_bytes=30%"),
        ("tiers=ssd", "tiers.policy=lru", "tiers.resident_bytes=30%"),
    ],
    ids=["sharded", "hotline", "lru"],
)
def test_however_tables_were_kept_in_training(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Bags are summed in another order if rows were in other places, which moves the last digits."""
    run = trained(tmp_path, *words, "trainer.max_steps=8")
    found = figures(recpipe.evaluate(run.folder, None, "split=eval", quiet=True))
    for name in ("auc", "logloss", "ne"):
        assert found[name] == pytest.approx(run.report["quality"][name], rel=1e-6), name


def test_figures_do_not_depend_on_the_batch_size(answers: Answers) -> None:
    small, large = (
        recpipe.evaluate(answers.folder, None, f"data.batch_size={size}", quiet=True) for size in (7, 3000)
    )
    assert small["tasks"]["score"]["positives"] == large["tasks"]["score"]["positives"]
    for name, value in figures(small).items():
        assert value == pytest.approx(figures(large)[name], rel=1e-6), name
    assert small["loss"] == pytest.approx(large["loss"], rel=1e-6)


def test_other_files_a_copied_checkpoint_and_a_module_in_memory(answers: Answers, tmp_path: Path) -> None:
    """The checkpoint alone is enough; its plain module gives the same logits on the same rows."""
    alone = Path(shutil.copytree(newest(answers.folder), tmp_path / "alone"))
    other = put(clicks(500, 2), tmp_path / "other.parquet")
    content = recpipe.evaluate(alone, other, quiet=True)
    assert content["data"]["samples"] == 500
    opened = open_trained(alone, [f"data.path={other}"])
    rows = next(opened.dataset.batches("train", 400))
    with opened.scoring() as scoring, torch.no_grad():
        (scored,) = scoring.scores(scoring.checked([rows]))
        plain = opened.model(rows.dense_features, rows.sparse_features).squeeze(1)
    assert scored.labels is not None
    assert torch.equal(scored.labels, rows.labels)
    torch.testing.assert_close(scored.scores, plain)


def test_synthetic_data_and_batches_of_a_caller(tmp_path: Path) -> None:
    """The model is trained on generated data, and scored on batches and, by other columns, refused."""
    words = ("data.samples=1500", "data.tables={a: 30, b: 40}", "data.batch_size=100", *SMALL, *PLAIN)
    recpipe.train(None, None, *words, output=tmp_path / "run", quiet=True).close()
    own = recpipe.evaluate(tmp_path / "run", None, "by=a", "by_top=2", quiet=True)
    data = {"name": "synthetic", "samples": 1500, "tables": {"a": 30, "b": 40}, "eval_fraction": 0.0}
    made = open_dataset(data, seed=1)
    given = recpipe.evaluate(tmp_path / "run", list(made.batches("train", 64)), quiet=True)
    assert figures(given) == pytest.approx(figures(own), rel=1e-6)
    assert len(own["by"]["slices"]) == 3
    assert sum(part["tasks"]["score"]["samples"] for part in own["by"]["slices"]) == 1500
    with pytest.raises(DataError, match="adds c"):
        recpipe.evaluate(tmp_path / "run", None, "data.tables={c: 30}", quiet=True)


# -- slices, tasks, models of one's own --------------------------------------------------------


def test_slices_by_values_and_by_buckets(answers: Answers, tmp_path: Path) -> None:
    """Of a text column with missing values, also a column that the model does not see, and of a number."""
    table = clicks(600, 3)
    other = put(table.append_column("device", pa.array(["a", "b", "b"] * 200)), tmp_path / "o.parquet", 70)
    by_city = recpipe.evaluate(answers.folder, other, "by=city", "by_top=2", quiet=True)["by"]
    names = [part["value"] for part in by_city["slices"]]
    assert names[-1] == "4 other values"
    words = table.column("city").to_pylist()
    for part in by_city["slices"][:2]:
        rows = np.array([word == part["value"] for word in words])
        assert part["tasks"]["score"]["samples"] == rows.sum()
        assert part["tasks"]["score"]["positives"] == table.column("click").to_numpy()[rows].sum()
    by_device = recpipe.evaluate(answers.folder, other, "by=device", quiet=True)["by"]["slices"]
    assert {part["value"]: part["tasks"]["score"]["samples"] for part in by_device} == {"b": 400, "a": 200}
    by_age = recpipe.evaluate(answers.folder, other, "by=age", "by_top=4", quiet=True)["by"]["slices"]
    assert by_age[-1]["value"] == "missing"
    assert len(by_age) == 5
    assert sum(part["tasks"]["score"]["samples"] for part in by_age) == 600


def test_slices_of_the_held_out_part_are_of_its_rows(answers: Answers) -> None:
    table = clicks(ROWS, 1).slice(ROWS - ROWS // 5)
    found = recpipe.evaluate(answers.folder, None, "split=eval", "by=city", quiet=True)["by"]["slices"]
    words = table.column("city").to_pylist()
    assert {p["value"]: p["tasks"]["score"]["samples"] for p in found} == {
        "missing" if word is None else word: words.count(word) for word in set(words)
    }


def test_slices_of_npy_files_and_of_batches_of_a_caller(tmp_path: Path) -> None:
    """By the rows of a table, and by dense values as the model sees them."""
    rng = np.random.default_rng(4)
    dense, sparse = rng.standard_normal((400, 13), np.float32), rng.integers(0, 5, (400, 26), np.int32)
    labels = rng.integers(0, 2, (400, 1)).astype(np.int32)
    for part, values in (("dense", dense), ("sparse", sparse), ("labels", labels)):
        np.save(tmp_path / f"day_0_{part}.npy", values)
    words = (
        "data=npy",
        f"data.path={tmp_path}",
        f"data.tables={{{', '.join(f'C{i}: 5' for i in range(1, 27))}}}",
        "data.batch_size=100",
        *SMALL,
        *PLAIN,
    )
    recpipe.train(None, None, *words, output=tmp_path / "run", quiet=True).close()
    batches = list(open_trained(tmp_path / "run").dataset.batches("train", 64))
    for data in (None, batches):
        by_row = recpipe.evaluate(tmp_path / "run", data, "by=C3", "by_top=3", quiet=True)["by"]["slices"]
        for part in by_row[:3]:
            own = sparse[: len(sparse) if data is None else 320, 2] == int(part["value"])
            assert part["tasks"]["score"]["samples"] == own.sum()
        by_value = recpipe.evaluate(tmp_path / "run", data, "by=I2", "by_top=4", quiet=True)["by"]["slices"]
        assert [part["tasks"]["score"]["samples"] for part in by_value] == [100 if data is None else 80] * 4
    with pytest.raises(DataError, match=r"by=C33: no such column; did you mean C3\?"):
        recpipe.evaluate(tmp_path / "run", None, "by=C33", quiet=True)


class Two(nn.Module):
    """Two outputs of one tower: whether a sample is clicked, and its price."""

    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingBagConfig(name="t", embedding_dim=8, num_embeddings=30, feature_names=["a"])
        self.bags = EmbeddingBagCollection([config])
        self.over = nn.Linear(8 + 13, 2)

    def forward(self, dense, sparse) -> dict[str, torch.Tensor]:
        found = self.over(torch.cat([self.bags(sparse).values(), dense], dim=1))
        return {"click": found[:, 0], "price": found[:, 1]}


def two_labels(split: SplitName) -> list[dict[str, Any]]:
    """Generated batches with two labels."""
    made = open_dataset({"name": "synthetic", "samples": 1000, "tables": {"a": 30}}, seed=1)
    return [
        {
            "dense": batch.dense,
            "sparse": batch.sparse,
            "labels": {"click": batch.labels, "price": batch.dense[:, 0]},
        }
        for batch in made.batches(split, 100)
    ]


def test_a_model_of_ones_own_with_two_tasks(tmp_path: Path) -> None:
    """Its loss is that of training's evaluation; each task has the figures of its kind, and a score."""
    words = ("model.loss={click: binary_cross_entropy, price: mean_squared_error}", *PLAIN)
    held_out, folder = two_labels("eval"), tmp_path / "run"
    run = recpipe.train(Two(), two_labels("train"), *words, held_out=held_out, output=folder, quiet=True)
    run.close()
    mine = Two()
    content = recpipe.evaluate(folder, held_out, model=mine, quiet=True)
    assert type(mine.bags) is EmbeddingBagCollection
    assert figures(recpipe.evaluate(folder, held_out, model=mine, quiet=True), "price") == figures(
        content, "price"
    )
    assert content["loss"] == pytest.approx(run.report["quality"]["loss"], rel=1e-6)
    assert set(figures(content, "click")) == {"auc", "pr_auc", "logloss", "ne", "calibration", "ece"}
    assert set(figures(content, "price")) == {"mse", "rmse", "mae", "calibration"}
    scores = recpipe.predict(folder, held_out, "scores=raw", model=Two(), quiet=True)
    assert scores.shape == (200, 2)
    labels = torch.cat([batch["labels"]["price"] for batch in held_out]).numpy()
    assert np.square(scores[:, 1] - labels).mean() == pytest.approx(
        figures(content, "price")["mse"], rel=1e-5
    )
    with pytest.raises(UserError, match="pass model=MODULE"):
        recpipe.evaluate(folder, held_out, quiet=True)


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.hash_ids=false"], "column city: holds string"),
        (["data.dense_transform=none"], "dense values were logarithms in training and are taken as they are"),
        (["data.tables={user: 501}"], "its table has 500 rows in the checkpoint and 501"),
        (["data.dense=[price]"], "the data lacks age"),
        (["data.dense=[age,price]"], "in another order than in training: price, age"),
        (["data.dense=[price,age,key]"], "the data adds key"),
        (["data.sparse=[user,city]"], "data.tables.tags: no such column in data.sparse"),
        (["data.path=nothing.parquet"], "nothing.parquet: no such file"),
        (["data.label=klick"], "no column 'klick'; did you mean click?"),
        (["model.embedding_dim=16"], "the checkpoint decides model, tables and optimizer"),
        (["+plugin=hotline"], "the checkpoint decides model, tables and optimizer"),
        (["split=test"], "split"),
        (["by=cty"], "no column 'cty'; did you mean city?"),
        (["by=tags"], "holds list"),
        (["split=eval", "data.eval_fraction=0.0"], "holds nothing out"),
        (["--cfg"], "takes key=value after the checkpoint, not '--cfg'"),
        (["data.batch_sise=3"], "Did you mean 'data.batch_size'?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_words_are_one_line(answers: Answers, words: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        recpipe.evaluate(answers.folder, None, *words, quiet=True)
    said = str(caught.value)
    assert message in said
    assert said.isprintable()


def test_a_column_of_another_kind_is_refused(answers: Answers, tmp_path: Path) -> None:
    """Numbers and text are hashed differently, so that the scores would be nonsense."""
    table = clicks(50, 4)
    numbers = table.set_column(5, "city", pa.array(np.arange(50)))
    with pytest.raises(DataError, match="column city: held text in training and holds numbers here"):
        recpipe.evaluate(answers.folder, put(numbers, tmp_path / "n.parquet"), quiet=True)
    single = table.set_column(6, "tags", pa.array(np.arange(50)))
    with pytest.raises(DataError, match="column tags: held lists in training and holds single ids here"):
        recpipe.evaluate(answers.folder, put(single, tmp_path / "s.parquet"), quiet=True)


def test_bad_rows_name_file_row_column_and_value(answers: Answers, tmp_path: Path) -> None:
    table = clicks(50, 4)
    prices = table.column("price").to_numpy().copy()
    prices[31] = np.inf
    file = put(table.set_column(2, "price", pa.array(prices)), tmp_path / "inf.parquet")
    with pytest.raises(DataError, match=r"inf\.parquet, row 32, column price: inf is not a finite"):
        recpipe.evaluate(answers.folder, file, quiet=True)
    with pytest.raises(DataError, match=r"no column 'click'"):
        recpipe.evaluate(
            answers.folder, put(table.drop_columns(["click"]), tmp_path / "no.parquet"), quiet=True
        )
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(answers.file.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"cut\.parquet: not a whole Parquet file"):
        recpipe.evaluate(answers.folder, cut, quiet=True)


def test_a_checkpoint_that_does_not_carry_its_recipe_says_what_it_lacks(
    answers: Answers, tmp_path: Path
) -> None:
    older = altered(answers, tmp_path, lambda trainer: trainer.pop(RECIPE))
    with pytest.raises(UserError, match="does not carry its recipe and columns"):
        recpipe.evaluate(older, quiet=True)
    (older / TRAINER).write_bytes(b"nonsense")
    with pytest.raises(UserError, match="damaged or missing"):
        recpipe.evaluate(older, quiet=True)
    with pytest.raises(UserError, match=f"^{tmp_path}/none: no whole checkpoint there"):
        recpipe.evaluate(tmp_path / "none", quiet=True)


# -- the command -------------------------------------------------------------------------------


def test_the_command_shows_a_table_and_leaves_evaluation_json(
    answers: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["evaluate", str(answers.folder), "split=eval", "by=city", f"hydra.run.dir={tmp_path}/run"]
    monkeypatch.setattr(sys, "argv", ["recpipe", *words])
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit) as caught:
        cli.main()
    said = capsys.readouterr().out
    assert caught.value.code == 0, said
    for text in ("AUC", "calibration", "the held-out part", "Köln"):
        assert text in said
    content = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert figures(content)["auc"] == answers.report["quality"]["auc"]
    monkeypatch.setattr(sys, "argv", ["recpipe", "evaluate"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    assert "say recpipe evaluate CHECKPOINT" in capsys.readouterr().err
