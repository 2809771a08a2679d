"""Data sources and tasks of installed packages: opened, typed, run and listed."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from recpipe.config.compose import compose
from recpipe.config.recipe import Recipe
from recpipe.data.make import open_dataset
from recpipe.errors import UserError
from recpipe.plugin.errors import PluginConflict
from recpipe.plugin.load import activate
from recpipe.plugin.offers import entry, offered
from recpipe.run import run
from recpipe.tasks import plugins as listing
from recpipe.tasks.plugins import MADE, write_starter

SOURCE = '''
from dataclasses import dataclass
from recpipe.data.config import SamplesConfig, SyntheticConfig
from recpipe.data.sources.synthetic import SyntheticDataset
from recpipe.common.validation import Positive

@dataclass
class Config(SamplesConfig):
    """Clicks of two tables."""
    clicks: Positive = 10
    rows: Positive = 100

def P(config: Config, seed: int):
    """Made-up clicks."""
    tables = {"user": config.rows, "item": config.rows}
    made = SyntheticConfig(samples=config.clicks, tables=tables, eval_fraction=config.eval_fraction)
    return SyntheticDataset(made, seed)
'''
TASK = '''
from pathlib import Path
from recpipe.data.make import open_dataset
from recpipe.config.recipe import Recipe

def P(recipe: Recipe, run_dir: Path) -> dict[str, object]:
    """Counts samples."""
    data = open_dataset(recipe.data, recipe.seed)
    return {"samples": data.size("train"), "times": recipe.task.settings["times"], "where": str(run_dir)}
'''


def test_a_data_source_is_opened_with_its_own_typed_keys(install) -> None:
    install("logs", "clicks: 1000\nbatch_size: 64\n", SOURCE, "data")
    config = Recipe.of(compose(["data=logs", "data.rows=50", "data.eval_fraction=0.5"])).data
    assert (type(config).__name__, config.name, config.batch_size, config.rows) == ("Config", "logs", 64, 50)
    dataset = open_dataset(config, 3)
    assert (dataset.size("train"), [f.rows for f in dataset.schema.sparse]) == (500, [50, 50])
    again = open_dataset({"name": "logs", "clicks": 100, "last_batch": "drop", "batch_size": 30}, 3)
    assert (again.size("train"), again.dropped_samples) == (60, 20)


def test_a_run_trains_on_it(install, tmp_path: Path) -> None:
    install("logs", "clicks: 600\n", SOURCE, "data")
    quiet = ["trainer.progress=false", "trainer.checkpoint_every=null", "trainer.logger=null"]
    recipe = compose(["data=logs", "data.batch_size=64", "data.rows=20", *quiet])
    assert run(recipe, tmp_path / "run")["data"]["train_samples"] == 480


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data=logs", "data.clicks=0"], "data.clicks=0: must be greater than or equal to 1"),
        (["data=logs", "data.rowz=3"], "no 'data.rowz' in the recipe. Did you mean 'data.rows'?"),
        (["data.name=lgs"], "data.name=lgs is unknown; did you mean logs"),
    ],
)
def test_its_keys_are_checked(install, words: list[str], message: str) -> None:
    install("logs", "clicks: 1000\n", SOURCE, "data")
    with pytest.raises(UserError, match=message):
        Recipe.of(compose(words))


def unannotated(config, seed): ...


@pytest.mark.parametrize("part", [unannotated, 3, dict, lambda config: None])
def test_a_source_whose_keys_have_no_types_is_refused(offer, part: object) -> None:
    offer("data", "logs", part)
    with pytest.raises(
        UserError, match=r"data source logs .* must be a function \(config: C, seed: int\) -> Dataset"
    ):
        open_dataset({"name": "logs"}, 1)


@pytest.mark.parametrize(
    ("opened", "message"),
    [
        ("[]", "data=logs opens a list, not a recpipe.kit.Dataset"),
        (
            "type('D', (Dataset,), {'size': 1, 'batches': 1})()",
            "D must set schema, fingerprint",
        ),
    ],
)
def test_a_source_that_opens_no_data_set(install, opened: str, message: str) -> None:
    code = (
        SOURCE.split("    tables =")[0]
        + f"    from recpipe.data.dataset import Dataset\n    return {opened}\n"
    )
    install("logs", "{}\n", code, "data")
    with pytest.raises(UserError, match=message):
        open_dataset({"name": "logs"}, 1)


def test_a_task_gets_the_recipe_and_leaves_its_report(install, tmp_path: Path) -> None:
    install("count", "times: 1\n", TASK, "task")
    words = ["task=count", "task.times=4", "data.samples=100", "data.table_scale=0.001"]
    report = run(compose(words), tmp_path)
    assert report == {"samples": 80, "times": 4, "where": str(tmp_path)}
    assert json.loads((tmp_path / "count.json").read_text()) == report


OBJECT = """
class P:
    \"\"\"Looks at the run.\"\"\"

    def run(self, context):
        run = context.joined
        tables = len(run.unplaced.tables.tables)
        return {"tables": tables, "deep": context.recipe.values["look"]["deep"], "batch": run.micro_batch}
"""


def test_a_task_may_be_an_object_with_a_section_of_its_own(install, tmp_path: Path) -> None:
    yaml = "# @package _global_\ntask: {}\nlook: {deep: 1}\n"
    install("look", yaml, OBJECT, "task")
    words = ["task=look", "look.deep=3", "data.samples=2000", "data.table_scale=0.001", "data.batch_size=64"]
    assert run(compose(words), tmp_path) == {"tables": 26, "deep": 3, "batch": 64}
    assert json.loads((tmp_path / "look.json").read_text())["deep"] == 3


@pytest.mark.parametrize("section", ["seed: 4", "other: {deep: 1}", "look: {}\ntiers: {prefetch: false}"])
def test_a_task_sets_no_other_section(install, section: str) -> None:
    install("look", f"# @package _global_\ntask: {{}}\n{section}\n", OBJECT, "task")
    with pytest.raises(UserError, match="may set the section task alone"):
        compose(["task=look"])


def test_a_task_that_cannot_run(install, tmp_path: Path) -> None:
    install("count", "{}\n", "P = 3\n", "task")
    with pytest.raises(UserError, match=r"task count .* must have run\(context\) -> dict, or be a function"):
        run(compose(["task=count"]), tmp_path)


def test_a_task_that_reports_nothing(install, tmp_path: Path) -> None:
    install("count", "times: 1\n", "def P(recipe, run_dir): pass\n", "task")
    with pytest.raises(UserError, match="task count .* returns a NoneType, not the report as a dict"):
        run(compose(["task=count"]), tmp_path)


def test_they_are_listed(
    install, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    install("logs", "{}\n", SOURCE, "data")
    install("count", "{}\n", TASK, "task")
    install("broken", "{}\n", None, "model")
    install("synthetic", "{}\n", SOURCE, "data")
    listing.plugins([])
    said = capsys.readouterr().out
    assert "data=logs" in said
    assert "Made-up clicks." in said
    assert "task=count" in said
    assert "broken: model=broken: model broken" in said
    assert "broken: data=synthetic: recpipe has a data source of this name" in said


def test_eighty_columns_are_enough(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    listing.plugins([])
    lines = capsys.readouterr().out.splitlines()
    assert "    alters: BATCH_SIZE, EXACT_GRADIENT, SAMPLE_SET" in lines, "words stay whole"
    at = next(number for number, line in enumerate(lines) if line.startswith("hotline  "))
    assert lines[at + 3] == "    extension points: cache (hotline.PopularTables), splitter"
    assert lines[at + 4] == "    (hotline.PopularFirst), report (hotline.report)"
    assert max(map(len, lines[:-2])) <= 80


def test_two_packages_with_one_name(offer: Callable[[str, str, object], None]) -> None:
    offer("task", "count", print)
    offer("task", "count", max)
    assert [name for name in offered("task") if name == "count"] == ["count"], (
        "the same entry point twice is one"
    )


def test_two_packages_with_different_models_of_one_name(install, capsys, monkeypatch) -> None:
    monkeypatch.setenv("RECPIPE_BLOCK", "")
    install("aa", "{}\n", "P = None\n", "model")
    other = install("bb", "{}\n", "P = None\n", "model")
    entries = other.parent / "bb_pkg-1.0.dist-info" / "entry_points.txt"
    entries.write_text("[recpipe.models]\naa = bb_pkg.plugin:P\n")
    with pytest.raises(PluginConflict, match="two installed packages provide a model named 'aa': "):
        compose(["model=aa"])
    assert compose(["model=dlrm"]).model.name == "dlrm", "a clash disturbs nobody who does not use the name"
    listing.plugins([])
    assert "broken: model=aa: two installed packages provide" in capsys.readouterr().out
    with pytest.raises(UserError, match="nothing installed has that name. Did you mean 'bb-pkg'"):
        compose(["+block=[bb_pgk]"])
    assert compose(["model=aa", "+block=[bb_pkg]"]).model.name == "aa"


def test_a_package_that_exits_when_it_is_imported_stops_nobody(install, capsys) -> None:
    install("exiter", code="import sys; sys.exit('bye')\n")
    listing.plugins([])
    assert "broken: exiter: " in (said := capsys.readouterr().out)
    assert "SystemExit: bye" in said
    with pytest.raises(UserError, match="plugin exiter .* cannot be imported from .*: SystemExit: bye"):
        activate({"exiter": {}})


def test_a_class_of_a_module_is_a_plugin_without_a_package(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("RECPIPE_MODULES", "")
    monkeypatch.syspath_prepend(str(tmp_path))
    code = (
        "from recpipe.plugin import Contribution, Plugin\n\n\nclass Told(Plugin):\n    api = (2, 0)\n\n"
        "    def __init__(self, *, what: int = 1):\n        self.what = what\n\n"
        "    def contribute(self, ctx):\n"
        "        return Contribution(report=[lambda run: {'what': self.what}])\n"
    )
    (tmp_path / "first_try.py").write_text(code)
    recipe = compose(["+plugin=first_try:Told", "plugins.told.what=5", "task=plan"])
    assert recipe.plugins == {"told": {"what": 5}}
    ((origin, plugin),) = activate({"told": {"what": 5}})
    assert (str(origin), plugin.what) == ("told (first_try in no package)", 5)
    assert list(compose(["+plugin=[hotline,first_try:Told]"]).plugins) == ["hotline", "told"]
    compose(["+plugin=no_such:P"])
    with pytest.raises(UserError, match="cannot be imported from 'no_such:P': .*the current directory"):
        activate({"p": {}})


@pytest.mark.parametrize("kind", MADE)
def test_a_new_package_is_whole(kind: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_starter(kind, "mine")
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    assert project["build-system"]["build-backend"] == "hatchling.build"
    (names,) = project["project"]["entry-points"].values()
    module, _, made = names["mine"].partition(":")
    assert f"{made}(" in (folder / module / "__init__.py").read_text()
    assert len(list((folder / module / "conf").glob("*/mine.yaml"))) == 1
    for file in folder.rglob("*"):
        assert not file.is_file() or "@NAME@" not in file.read_text()
    with pytest.raises(UserError, match="recpipe-mine is there already"):
        write_starter(kind, "mine")
    with pytest.raises(UserError, match="no kind 'splitters': did you mean splitter"):
        write_starter("splitters", "mine2")
    with pytest.raises(UserError, match="'My-own' is no name"):
        write_starter(kind, "My-own")


def test_missing_tasks_of_recpipes_own_send_to_the_doctor(monkeypatch) -> None:
    monkeypatch.setattr("recpipe.plugin.offers.metadata.entry_points", lambda group: ())
    with pytest.raises(UserError, match="no task 'plan'.*older than its files, run recpipe doctor"):
        entry("task", "plan", offered("task"))
