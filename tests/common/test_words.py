"""A user's own model on the command line, in sweeps and in yaml; whose ``_target_`` is read, whose is not."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from recpipe import cli as command_line
from recpipe.common.words import for_hydra, options_first
from recpipe.config.compose import choices, compose, hydra_words
from recpipe.config.recipe import Recipe
from recpipe.errors import UserError
from tests.plugin.samples import write
from tests.processes import Child

TARGET = "model._target_=my_pkg.Tower"
BUILT_IN = ("dlrm", "dlrm_dcn")


@pytest.mark.parametrize(
    ("words", "made"),
    [
        (["model.bottom=[3]", "seed=1"], ["model.bottom=[3]", "seed=1"]),
        (["model=dlrm", "model.bottom=[3]"], ["model=dlrm", "model.bottom=[3]"]),
        (["-m", TARGET, "model.k=1,2"], ["-m", "model=custom", f"++{TARGET}", "++model.k=1,2"]),
        ([f"++{TARGET}", "+model.k=1"], ["model=custom", f"++{TARGET}", "+model.k=1"]),
        (["model=mine", "model.k=1", "~model.j"], ["model=mine", "++model.k=1", "~model.j"]),
        (["model=dlrm,mine", "model.k=1"], ["model=dlrm,mine", "++model.k=1"]),
        (["model=mine", TARGET], ["model=mine", f"++{TARGET}"]),
        (["--config-dir", "conf", "model.k=1"], ["--config-dir", "conf", "++model.k=1"]),
        (["-cn=mine", TARGET], ["-cn=mine", f"++{TARGET}"]),
        (["hydra.searchpath=[a]", "model.k=1"], ["hydra.searchpath=[a]", "++model.k=1"]),
        (["optim.dense.eps=1", "optim.dense.lr=1"], ["++optim.dense.eps=1", "optim.dense.lr=1"]),
        (["optim.dense={eps: 1}", "optim.dense=1"], ["++optim.dense={eps: 1}", "optim.dense=1"]),
        (["~optim.dense.lr", "optim.by_table.a.lr=1"], ["~optim.dense.lr", "++optim.by_table.a.lr=1"]),
        (["--config-path=/conf", "-cp", "/b"], ["--config-path=/conf", "-cp", "/b"]),
    ],
)
def test_words_as_hydra_gets_them(words: list[str], made: list[str]) -> None:
    found = for_hydra(words, BUILT_IN, lambda: ["tower"])
    assert found == made
    assert for_hydra(found, BUILT_IN, lambda: ["tower"]) == made, "a second time changes nothing"


@pytest.mark.parametrize(
    ("words", "made"),
    [
        (["a=1", "-m", "b=1,2"], ["-m", "a=1", "b=1,2"]),
        (["a=1", "--config-dir", "x=y", "~b"], ["--config-dir", "x=y", "a=1", "~b"]),
        (["a=1", "--cfg", "job", "+b=2", "--resolve"], ["--cfg", "job", "--resolve", "a=1", "+b=2"]),
        (["a=1", "--info", "b=2"], ["--info", "a=1", "b=2"]),
        (["a=1", "-i", "defaults", "-cn=mine"], ["-i", "defaults", "-cn=mine", "a=1"]),
        (["-cn", "-m", "a=1"], ["-cn", "-m", "a=1"]),
    ],
)
def test_options_may_stand_anywhere(words: list[str], made: list[str]) -> None:
    assert options_first(words) == made
    assert options_first(made) == made


def test_a_relative_config_path_starts_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert for_hydra(["--config-path=conf", "-cp", "c"], (), list) == [
        f"--config-path={tmp_path}/conf",
        "-cp",
        f"{tmp_path}/c",
    ]


@pytest.mark.parametrize("choice", ["model=dlrm", "model=tower", "model=mine,dlrm_dcn"])
def test_two_choices_of_a_model_are_refused(choice: str) -> None:
    with pytest.raises(UserError, match=r"model=\w+ and model._target_=my_pkg.Tower each choose a model"):
        for_hydra([choice, TARGET], BUILT_IN, lambda: ["tower"])


def test_recpipes_own_options_are_known() -> None:
    assert hydra_words(["model=dlrm_dcn", "model.nope=1"]) == ["model=dlrm_dcn", "model.nope=1"]


# -- the command line ------------------------------------------------------------------------

TOWER = """
from torch import nn
class Tower(nn.Module):
    def __init__(self, schema, hidden=3):
        super().__init__()
"""
SEE = """
import json, os, sys, types
import recpipe.cli
from recpipe.config.recipe import Recipe
module = types.ModuleType("recpipe.run")
def run(recipe, directory, command_line):
    import torch
    from recpipe.data.dataset import Schema
    from recpipe.model.make import make_model
    model = Recipe.of(recipe).model
    made = make_model(model, Schema((), ()), torch.device("cpu"))
    print("SEEN", json.dumps([type(made).__module__, dict(model.arguments)]))
module.run = run
sys.modules["recpipe.run"] = module
sys.path = [place for place in sys.path if place not in ("", os.getcwd())]
sys.path[:0] = [] if SCRIPT else [""]
recpipe.cli.main()
"""


@pytest.fixture
def seen(tmp_path: Path) -> Callable[..., list[object]]:
    """``seen(*arguments)``: module and arguments of each model that the command line has made."""
    write(tmp_path / "my_pkg.py", TOWER)

    def start(*arguments: str, script: bool = False) -> list[object]:
        code = SEE.replace("SCRIPT", str(script))
        done = Child(tmp_path, *arguments, script=code).ended()
        assert done.returncode == 0, done.stdout + done.stderr
        return [
            json.loads(line.removeprefix("SEEN "))
            for line in done.stdout.splitlines()
            if line.startswith("SEEN")
        ]

    return start


def test_a_class_in_the_current_directory(seen) -> None:
    """Also under the script ``recpipe``, for which Python does not look there."""
    for script in (False, True):
        assert seen(TARGET, "model.hidden=64", script=script) == [["my_pkg", {"hidden": 64}]]


def test_a_sweep_over_its_arguments(seen) -> None:
    assert seen("-m", TARGET, "model.hidden=32,64") == [
        ["my_pkg", {"hidden": 32}],
        ["my_pkg", {"hidden": 64}],
    ]


def test_a_config_dir_and_a_config_path_of_the_users_own(seen, tmp_path: Path) -> None:
    write(tmp_path / "conf" / "model" / "my_tower.yaml", "_target_: my_pkg.Tower\n")
    write(tmp_path / "conf" / "mine.yaml", "defaults: [train, override model: my_tower, _self_]\n")
    expected = [["my_pkg", {"hidden": 5}]]
    assert seen("--config-dir=conf", "model=my_tower", "model.hidden=5") == expected
    assert seen("--config-dir", "conf", "--config-name=mine", "model.hidden=5") == expected
    assert seen("--config-path=conf", "--config-name=mine", "model.hidden=5") == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model.botom=[3]"], "no 'model.botom' in the recipe. Did you mean 'model.bottom'?"),
        (["-m", "model.botom=[3],[4]"], "Did you mean 'model.bottom'?"),
        ([TARGET, "model=dlrm"], "each choose a model"),
        ([TARGET, "trainer.max_stepz=1"], "Did you mean 'trainer.max_steps'?"),
        ([TARGET, "model.k=[1"], "cannot read the override 'model.k=[1'"),
        (["model=cusom"], "no model 'cusom'. Did you mean 'custom'?"),
    ],
)
def test_errors_are_still_one_line(arguments, message, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setattr(sys, "argv", ["recpipe", *arguments])
    with pytest.raises(SystemExit) as left:
        command_line.main()
    said = capsys.readouterr().err
    assert left.value.code == 2
    assert message in said
    assert said.count("\n") == 1


# -- whose _target_ --------------------------------------------------------------------------

HIDDEN = "# @package _global_\nmodel: \"${oc.decode:'{_target_: my_pkg.Tower}'}\"\n"


@pytest.mark.parametrize(
    ("file", "yaml", "word"),
    [
        ("experiment/evil", "# @package _global_\nmodel: {_target_: my_pkg.Tower}\n", "+experiment=evil"),
        ("experiment/evil", "# @package model\n_target_: my_pkg.Tower\n", "+experiment=evil"),
        ("experiment/evil", HIDDEN, "+experiment=evil"),
        ("model/evil", "_target_: my_pkg.Tower\n", "model=evil"),
        ("model/good", "hidden: 3\n_target_: my_pkg.Tower\n", "model=good"),
        ("model/good", "hidden: {_target_: my_pkg.Tower}\n", "model=good"),
        ("data/evil", "# @package _global_\nmodel: {_target_: my_pkg.Tower}\n", "data=evil"),
        ("tiers/evil", "# @package _global_\nmodel: {_target_: my_pkg.Tower}\n", "tiers=evil"),
    ],
)
def test_a_packages_yaml_names_no_class(install, file: str, yaml: str, word: str) -> None:
    package = install("good", "hidden: 3\n", TOWER.replace("Tower", "P"), "model")
    assert Recipe.of(compose(["model=good"])).model.arguments == {"hidden": 3}
    write(package / "conf" / f"{file}.yaml", yaml)
    with pytest.raises(UserError, match=rf"{file}.yaml (has a _target_|sets model._target_)") as refused:
        compose([word])
    assert "\n" not in str(refused.value)


def test_a_plugins_knobs_name_no_class(install) -> None:
    install("acme", "# @package _global_\nplugins: {acme: {}}\nmodel: {_target_: my_pkg.Tower}\n")
    with pytest.raises(UserError, match="acme.yaml sets model._target_, but may set plugins.acme alone"):
        compose(["+plugin=acme"])


def test_files_that_a_recipe_names_are_not_read_for_its_model(tmp_path: Path) -> None:
    """A checkpoint and a plan are data: what they say of a model's class reaches no recipe."""
    said = json.dumps(
        {"model": {"_target_": "my_pkg.Tower"}, "recipe": {"model": {"_target_": "my_pkg.Tower"}}}
    )
    write(tmp_path / "step-00000001.ckpt" / "MANIFEST.json", said)
    write(tmp_path / "plan.json", said)
    recipe = Recipe.of(compose([f"resume={tmp_path}", f"tiers.plan={tmp_path / 'plan.json'}"]))
    assert recipe.model == Recipe.of(compose()).model
    assert "_target_" not in json.dumps(recipe.values["model"])


# -- what packages may set -------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        "model",
        # The rule is the same for all sections.
        pytest.param("data", marks=pytest.mark.soak),
        pytest.param("task", marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("# @package _global_\nseed: 2\n", "{file} sets seed, but may set the section {kind} alone"),
        ("# @package tiers\nstore: ssd\n", "{file} sets tiers.store, but"),
        ("defaults: [/tiers: ssd]\nk: 1\n", "{file} sets defaults: "),
        ("[1]\n", "{file} must map keys to values"),
        ("name: other\n", "{file} names another"),
        ("# @package _global_\n{kind}: {{k: 1}}\n", "{file} has a line '# @package _global_'; leave it out"),
    ],
)
def test_a_packages_yaml_sets_its_own_section_alone(install, kind: str, yaml: str, message: str) -> None:
    package = install(
        "good", yaml.replace("{kind}", kind).replace("{{", "{").replace("}}", "}"), "P = None\n", kind
    )
    file = f"{package}/conf/{kind}/good.yaml"
    if kind == "task" and "leave it out" in message:  # a task may have a section of its own beside it
        assert compose(["task=good"]).task.k == 1
        return
    with pytest.raises(UserError) as refused:
        compose([f"{kind}=good"])
    assert message.format(file=file, kind=kind) in str(refused.value)
    compose()


def test_a_package_does_not_speak_for_anothers_model(install) -> None:
    package = install("aa", "k: 1\n", "P = None\n", "model")
    install("bb", "k: 2\n", "P = None\n", "model")
    write(package / "conf" / "model" / "bb.yaml", "k: 3\n")
    assert compose(["model=bb"]).model == {"k": 2, "name": "bb"}
    assert {"aa", "bb", "dlrm", "custom"} <= choices()["model"]


def test_what_is_offered_without_a_yaml(offer) -> None:
    offer("data", "logs", print)
    with pytest.raises(
        UserError, match="data source 'logs' is installed but brings no conf/data/logs.yaml; ask"
    ):
        compose(["data=logs"])
