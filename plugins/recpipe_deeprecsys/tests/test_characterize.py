"""task=characterize: what it writes of recipes, checkpoints and packages, in the papers' orders; and what it
refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from recpipe_deeprecsys.characterize import task
from recpipe_deeprecsys.characterize.operators import CLASSES, FC, LOOKUP
from recpipe_deeprecsys.characterize.roofs import Roofs
from recpipe_deeprecsys.tests.test_roofs import samples

from recpipe.answers.trained import Trained
from recpipe.config.compose import compose
from recpipe.errors import UserError
from recpipe.run import run

SAMPLES = 8
QUICK = (
    *("task=characterize", "trainer.backend=plain", "characterize.seconds=0.001", "characterize.batches=4"),
    *(f"data.batch_size={SAMPLES}", "data.samples=200"),
)
SMALL = (*QUICK, "data=synthetic", "data.tables={a: 50, b: 400}", "model.bottom=[8]", "model.top=[8]")


OTHERS = 0.1
"""The share of the cores that other programs may take where roofs are judged."""


class Machine:
    """One that does not exist, and is not slow."""

    roofs, again, disturbed = Roofs.of(samples(1e3), 2), False, ""


@pytest.fixture(autouse=True)
def _machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("soak") is None:
        monkeypatch.setattr(task, "Machine", Machine)


def told(folder: Path, *words: str) -> dict[str, Any]:
    found = run(compose(list(words)), folder)
    assert json.loads((folder / "characterize.json").read_text()) == json.loads(json.dumps(found))
    return found


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_a_recipe_by_batch_size(tmp_path: Path, mode: str) -> None:
    found = told(tmp_path, *SMALL, "characterize.batch_sizes=[1,16]", f"characterize.mode={mode}")
    (model,) = found["models"]
    assert [batch["batch_size"] for batch in model["batches"]] == [1, 16]
    for batch in model["batches"]:
        shares = [batch["classes"][name]["share"] for name in CLASSES]
        assert sum(shares) + batch["between"]["share"] == pytest.approx(1)
        assert batch["classes"][FC]["per_weight"] == pytest.approx(2 * batch["batch_size"])
        assert batch["classes"][LOOKUP]["per_weight"] == 1
        assert {row["phase"] for row in batch["operators"]} >= {"forward"}
        assert any(row["phase"] == "backward" for row in batch["operators"]) == (mode == "training")
    assert {(table["name"], table["rows"]) for table in model["tables"]} == {("a", 50), ("b", 400)}
    assert all(table["bytes"] == 4 * table["dim"] * table["rows"] for table in model["tables"])
    assert model["skew"]["batches"] == model["reuse"]["batches"] == 4
    page = (tmp_path / "characterize.html").read_text()
    assert all(word in page for word in ("Roofline", "Access skew", "Misses of all tables", *CLASSES))


def small(name: str) -> tuple[str, ...]:
    return (*QUICK, f"experiment={name}", "data.table_scale=0.0005", "data.eval_fraction=0.5")


def test_shares_have_the_papers_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the least times that the operators can take, for what they do take is the machine's: of lookups RMC2
    > RMC1 > RMC3, of layers the reverse (Gupta et al., figure 10)."""
    monkeypatch.setattr(task.page, "write", lambda told, folder: None)
    lookups, layers = [], []
    for name in ("rmc2", "rmc1", "rmc3"):
        (model,) = told(tmp_path / name, *small(name))["models"]
        classes = model["batches"][0]["classes"]
        whole = sum(own["least_seconds"] for own in classes.values())
        lookups.append(classes[LOOKUP]["least_seconds"] / whole)
        layers.append(classes[FC]["least_seconds"] / whole)
        sizes = {"rmc1": (0.20e6, 82e3), "rmc2": (0.64e6, 983e3), "rmc3": (6.41e6, 26e3)}[name]
        assert classes[FC]["flops"] / SAMPLES == pytest.approx(sizes[0], rel=0.05)
        rows = [row for row in model["batches"][0]["operators"] if row["class"] == LOOKUP]
        assert sum(row["gathered_bytes"] for row in rows) / SAMPLES == pytest.approx(sizes[1], rel=0.02)
    assert lookups == sorted(lookups, reverse=True)
    assert layers == sorted(layers)


@pytest.mark.soak
def test_measured_shares_have_the_papers_order_and_nothing_is_above_its_roof(tmp_path: Path) -> None:
    """The whole tables, and this machine as it is: nothing is faster than its limits by more than 5%, though
    they may have been measured anew for that. Limits that were measured while other programs took the cores
    are too low, which is told, and say nothing."""
    names = ("rmc2", "rmc1", "rmc3")
    recipes = ", ".join(f'"experiment={name}"' for name in names)
    words = ["task=characterize", "data.samples=20000", f"characterize.recipes=[{recipes}]"]
    words += ["characterize.batch_sizes=[64,512]", "characterize.batches=8", "characterize.seconds=5"]
    found = run(compose(words), tmp_path, words)["models"]
    for place in range(2):
        classes = [model["batches"][place]["classes"] for model in found]
        lookups, layers = ([own[name]["share_of_operators"] for own in classes] for name in (LOOKUP, FC))
        assert lookups == sorted(lookups, reverse=True)
        assert layers == sorted(layers)
    alone = [model for model in found if (model["others_cpu_share"] or 0.0) < OTHERS]
    quiet = [model for model in alone if not model["disturbed"]]
    assert not any(batch["above"] for model in quiet for batch in model["batches"])
    if not quiet:
        pytest.skip("shares are in order; roofs are not judged: other programs took the cores")


def test_recipes_beside_each_other_are_run_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with the words that all have and its own; here in this process."""
    asked: list[list[str]] = []

    def launch(words: list[str], folder: Path) -> None:
        asked.append(words)
        run(compose([word for word in words if not word.startswith("hydra")]), folder)

    monkeypatch.setattr(task, "run_apart", launch)
    words = [*SMALL, 'characterize.recipes=["model.top=[4]","data.batch_size=4 seed=3"]']
    found = run(compose(words), tmp_path, words)
    assert [model["name"] for model in found["models"]] == ["model.top=[4]", "data.batch_size=4 seed=3"]
    assert [model["batches"][0]["batch_size"] for model in found["models"]] == [SAMPLES, 4]
    assert asked[1][: len(SMALL)] == list(SMALL)
    assert asked[1][-3:-1] == ["data.batch_size=4", "seed=3"]


@pytest.mark.parametrize(
    ("words", "told_of"),
    [
        (["characterize.batch_sizes=[0]"], r"characterize\.batch_sizes.*0"),
        (["characterize.batch_sizes=[]"], r"characterize\.batch_sizes"),
        (["characterize.batch_sizes=[100000]"], r"batch_sizes=100000: the data have \d+ samples to train"),
        (["characterize.mode=both"], r"characterize\.mode.*inference"),
        (["characterize.source=/no/such"], r"source=/no/such: there is no such checkpoint, run or package"),
        (["characterize.study=true"], r"study is about a trained model's weights"),
        (["+plugin=hotline"], r"leave \+plugin=hotline out"),
        (['characterize.recipes=["seed=1"]'], "words of the command line"),
        (
            ["data.batch_size=160", "characterize.batch_sizes=[16]"],
            r"ids of 2 batches of data\.batch_size=160",
        ),
        (["characterize.seconds=0"], r"characterize\.seconds"),
    ],
)
def test_what_cannot_be_is_one_clear_line(tmp_path: Path, words: list[str], told_of: str) -> None:
    with pytest.raises(UserError) as refused:
        run(compose([*SMALL, *words]), tmp_path)
    assert re.search(told_of, str(refused.value)), refused.value
    assert "\n" not in str(refused.value)


def test_a_quantized_checkpoint_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Quantized(Trained):
        """Of another format."""

    opened = Quantized(tmp_path, *[None] * 5)  # type: ignore[arg-type]
    monkeypatch.setattr(task, "open_trained", lambda *given: opened)
    with pytest.raises(UserError, match=r"is quantized, .* package it"):
        run(compose([*SMALL, f"characterize.source={tmp_path}"]), tmp_path / "run")


def test_an_unknown_recipe_of_several_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(words: list[str], folder: Path) -> None:
        compose([word for word in words if not word.startswith("hydra")])

    monkeypatch.setattr(task, "run_apart", launch)
    words = [*SMALL, 'characterize.recipes=["experiment=rmc9"]']
    with pytest.raises(UserError, match=r"characterize\.recipes: 'experiment=rmc9': .*rmc1"):
        run(compose(words), tmp_path, words)
