"""``recpipe schema`` and ``data.features=auto``: from a file that nobody has described to a run that says how
it was read."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from recpipe.answers.words import scoring_recipe
from recpipe.checkpoint.table_io import load_trainer, newest
from recpipe.checkpoint.trained_on import TrainedOn
from recpipe.config.compose import compose
from recpipe.config.recipe import Recipe
from recpipe.data.config import FilesConfig
from recpipe.data.feature_yaml import read_features
from recpipe.data.features import Features
from recpipe.errors import UserError
from recpipe.run import run
from recpipe.setup.described import with_features
from recpipe.tasks.schema import schema


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CSV file as it lies, of 600 clicks; ``paid`` says afterwards what was clicked."""
    rng = np.random.default_rng(1)
    file = tmp_path_factory.mktemp("files") / "my clicks.csv"
    lines = ["click;user id;genres;price;paid"]
    for _ in range(600):
        click, genres = rng.integers(0, 2), "|".join(rng.permutation(["Comedy", "War", "Sci-Fi"])[:2])
        paid = f"{rng.random():.2f}" if click else ""
        lines.append(f"{click};{rng.integers(1, 80)};{genres};{rng.lognormal():.2f};{paid}")
    file.write_text("\n".join(lines) + "\n")
    return file


FEATURES = {
    "labels": [{"name": "click"}],
    "features": [
        {"name": "user id", "kind": "id", "type": "integer", "ids": "vocabulary"},
        {"name": "genres", "kind": "multi_hot", "separator": "|", "type": "text", "ids": "vocabulary"},
        {"name": "price", "kind": "dense", "scale": "log1p"},
    ],
    "unread": ["paid"],
}


def words(clicks: Path, folder: Path, *more: str) -> list[str]:
    """Of a small run on the file."""
    return [
        *("data=files", f"'data.path={clicks}'", f"data.cache_dir={folder}/cache", "data.batch_size=128"),
        *("model.embedding_dim=4", "trainer.backend=plain", "trainer.progress=false", "trainer.logger=null"),
        *("task.page=false", *more),
    ]


def columns(of: Recipe | Path) -> Features:
    """The features of a recipe or a yaml file, without the kind that a model's loss asks of labels."""
    found = read_features(of) if isinstance(of, Path) else of.data.described()
    return replace(found, labels=tuple(replace(label, kind=None) for label in found.labels))


def carried_out(folder: Path, arguments: Sequence[str]) -> dict[str, Any]:
    return run(compose([word.strip("'") for word in arguments]), folder)


# -- the command ------------------------------------------------------------------------------


def test_the_command_prints_what_it_found_and_writes_what_it_chose(
    clicks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert schema([str(clicks), "label=click"]) == 0
    assert yaml.safe_load(Path("features.yaml").read_text()) == FEATURES
    said = " ".join(capsys.readouterr().out.split())
    assert "Read: all 600 rows." in said
    assert "! paid: suspected leak: has a value exactly where click is 1 (AUC 1.000)" in said
    assert "! genres: is read as lists, split at '|'" in said
    told = f"'data.path={clicks}' data.features=features.yaml"
    assert f"python -m recpipe data=files {told}" in said
    assert f"Train with: python -m recpipe data=files {told}" in Path("features.yaml").read_text()


def test_its_command_trains_with_what_it_wrote(
    clicks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the words that say how text is written."""
    monkeypatch.chdir(tmp_path)
    schema([str(clicks), "label=click", 'separator=";"', "output=mine.yaml", "sample=100"])
    command = shlex.split(capsys.readouterr().out.strip().splitlines()[-1])
    recipe = Recipe.of(compose(command[3:]))
    assert isinstance(recipe.data, FilesConfig)
    assert recipe.data.separator == ";"
    assert columns(recipe) == columns(tmp_path / "mine.yaml")


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["label=paid,click"], r"label=paid,click: several are written label=\[paid,click\]"),
        (["labels=click"], "recpipe schema has no 'labels'; did you mean label?"),
        (["sample=0"], "sample=0"),
        (
            ["label=price", "output=there.yaml"],
            "there.yaml: is there already",
        ),
        (["label=genres"], "label=genres: holds .* a label is numbers or bool"),
        (["output=no/such/folder.yaml"], "folder.yaml: cannot be written"),
    ],
)
def test_what_it_cannot_do_is_one_line(
    clicks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.yaml").write_text("mine")
    with pytest.raises(UserError, match=told) as error:
        schema([str(clicks), *more])
    assert "\n" not in str(error.value)
    assert Path("there.yaml").read_text() == "mine"


def test_no_file_is_one_line() -> None:
    with pytest.raises(UserError, match="nowhere.csv: no such file"):
        schema(["nowhere.csv", "label=click"])


# -- auto -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(clicks: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with ``data.features=auto``."""
    folder = tmp_path_factory.mktemp("auto")
    carried_out(folder, words(clicks, folder, "data.label=click", "data.features=auto"))
    return folder


def trained_on(folder: Path) -> TrainedOn:
    directory = newest(folder)
    return TrainedOn.read(load_trainer(directory / "trainer.pt"), directory)


def test_a_run_with_auto_says_what_was_chosen(trained: Path) -> None:
    """In its report, its checkpoint and a file of its own, so that none of these depends on another look."""
    report = json.loads((trained / "report.json").read_text())
    assert report["recipe"]["data"]["features"] == FEATURES
    assert report["recipe"]["data"]["label"] is None
    assert trained_on(trained).values["data"]["features"] == FEATURES
    assert yaml.safe_load((trained / "features.yaml").read_text()) == FEATURES
    assert "suspected leak" in (trained / "recpipe.log").read_text()


def test_stated_features_train_the_same_samples(clicks: Path, trained: Path, tmp_path: Path) -> None:
    """Bitwise the same losses."""
    stated = f"data.features={trained / 'features.yaml'}"
    report = carried_out(tmp_path, words(clicks, tmp_path, stated))
    auto = json.loads((trained / "report.json").read_text())
    assert report["recipe"]["data"]["features"] == FEATURES
    assert report["quality"] == auto["quality"]


def test_other_files_are_read_as_training_read_its_own(trained: Path, tmp_path: Path) -> None:
    """Of a file whose columns would be proposed otherwise, ids without separators among them."""
    other = tmp_path / "other.csv"
    other.write_text("click;user id;genres;price;paid\n1;7;War;2.0;\n0;8;Comedy;3.0;\n")
    recipe = scoring_recipe(trained_on(trained), [f"data.path={other}"])
    assert columns(recipe) == columns(trained / "features.yaml")


def test_a_resumed_run_keeps_what_was_chosen(clicks: Path, trained: Path, tmp_path: Path) -> None:
    """Though the file has grown, and would be proposed otherwise today."""
    grown = tmp_path / "my clicks.csv"
    grown.write_text(clicks.read_text() + "".join(f"1;{n};War;-9000.0;1.0\n" for n in range(3000)))
    asked = ["data=files", f"data.path={grown}", "data.label=click", "data.features=auto"]
    anew = with_features(Recipe.of(compose(asked)), None)
    kept = with_features(Recipe.of(compose([*asked, f"resume={trained}"])), None)
    assert anew.values["data"]["features"] != FEATURES
    assert kept.values["data"]["features"] == FEATURES
    assert columns(kept) == columns(trained / "features.yaml")


def test_several_labels_and_weights_are_stated_once_chosen(clicks: Path) -> None:
    """And no longer beside the features."""
    asked = ["data=files", f"data.path={clicks}", "data.label=[click,paid]", "data.weight=price"]
    made = with_features(Recipe.of(compose([*asked, "data.features=auto"])), None)
    content = made.values["data"]["features"]
    assert [label["name"] for label in content["labels"]] == ["click", "paid"]
    assert content["weight"] == made.data.described().weight == "price"
    assert made.values["data"]["weight"] is made.values["data"]["label"] is None


def test_auto_is_for_training(trained: Path) -> None:
    recipe = scoring_recipe(trained_on(trained), ["data.features=auto"])
    with pytest.raises(UserError, match="data.features=auto is for training") as error:
        recipe.data.described()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["'data.sparse=[genres]'"], "data.features=auto chooses the columns"),
        (["data.label=clicks"], "label=clicks: no such column; did you mean click?"),
    ],
)
def test_what_auto_cannot_do_is_one_line(clicks: Path, tmp_path: Path, more: list[str], told: str) -> None:
    with pytest.raises(UserError, match=told) as error:
        carried_out(tmp_path, words(clicks, tmp_path, "data.features=auto", *more))
    assert "\n" not in str(error.value)
