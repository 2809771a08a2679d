"""The command line's edges: exit statuses, one clear line for a user's error, the nearest right name."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path

import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from recpipe import cli as command_line
from recpipe.errors import UserError
from recpipe.report.record import write_json
from tests.processes import Cli
from tests.report.test_report import make_report


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trainer.max_stepz=3"], "no 'trainer.max_stepz' in the recipe. Did you mean 'trainer.max_steps'?"),
        (["tainer.max_steps=3"], "no 'tainer.max_steps' in the recipe. Did you mean 'trainer.max_steps'?"),
        (["data=npy", "data.tables={t0: 5}"], "data.tables: Key 't0' is not in struct."),
        (["max_steps=3"], "no 'max_steps' in the recipe. Did you mean 'trainer.max_steps'?"),
        (["data.bach_size=3"], "Did you mean 'data.batch_size'?"),
        (["data=crteo"], "no data 'crteo'. Did you mean 'criteo'? There are: criteo, "),
        (["data=" + 3000 * "a/"], "too long for a file's name"),
        (["task=comprae"], "no task 'comprae'. Did you mean 'compare'?"),
        (["+plugin=hotlin"], "no plugin 'hotlin'. Did you mean 'hotline'? Installed: "),
        (["+plugin=[hotline,nope]"], "no plugin 'nope'. Installed: "),
        (["+plugins=hotline"], "plugins are chosen by +plugin=NAME"),
        (["plugin=hotline"], "write +plugin=NAME or '+plugin=[a,b]', with the plus sign"),
        (["+plugin=hotline", "plugins.hotline.nope=1"], "no 'plugins.hotline.nope' in the recipe."),
        (["model.labels=clicked"], "goes with a class of your own, model._target_=package.Class"),
        (
            ["data.path=x"],
            "in this recipe: it goes with data=criteo or data=files or data=npy or data=parquet",
        ),
        (["plugins.hotline.sample=0.1"], "in this recipe: it goes with +plugin=hotline"),
        (["compare.plugins=[lru]"], "in this recipe: it goes with task=compare"),
        (["-m", "trainer.max_stepz=1,2"], "Did you mean 'trainer.max_steps'?"),
        (["seed==1="], "cannot read the override 'seed==1='"),
        (["~trainer.nope"], "no 'trainer.nope' in the recipe."),
        (["--config-dir", "no/such/folder"], "no/such/folder' not found"),
        (
            ["trian"],
            "no command 'trian'. Commands: schema, evaluate, predict, package, apply, log, plugins, ",
        ),
        (["doctor", "now"], "recpipe doctor takes no arguments, not 'now'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_user_errors_are_one_line_and_exit_2(job, capsys, arguments: list[str], message: str) -> None:
    def run(*given: object) -> None:
        raise AssertionError("it is refused before anything is run")

    assert job(run, *arguments) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.parametrize("arguments", [("trainer.max_stepz=3",), ("-m", "trainer.max_stepz=1,2"), ("trian",)])
def test_a_process_says_no_more_than_the_line(cli: Cli, arguments: tuple[str, ...]) -> None:
    done = cli(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_full_error_shows_the_traceback(cli: Cli) -> None:
    done = cli("+plugin=hotlin", HYDRA_FULL_ERROR="1")
    assert done.returncode != 0
    assert "Traceback" in done.stderr
    assert "UserError" in done.stderr


@pytest.mark.parametrize("words", [["--version"], ["+plugin=hotline", "--version"]])
def test_the_version_is_recpipes(words: list[str], monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["recpipe", *words])
    with pytest.raises(SystemExit) as left:
        command_line.main()
    assert left.value.code == 0
    said = capsys.readouterr().out
    for name in ("recpipe", "torch", "torchrec"):
        assert f"{name} {version(name)}, " in said
    assert "Hydra" not in said


def test_help_and_listings(cli: Cli) -> None:
    shown = cli("--help")
    assert shown.returncode == 0
    for text in (
        "task=compare",
        "+plugin=",
        "recpipe doctor",
        "recpipe evaluate CHECKPOINT",
        "data=",
        "synthetic",
        "hotline",
    ):
        assert text in shown.stdout
    plugins = cli("plugins")
    assert plugins.returncode == 0
    assert "hotline" in plugins.stdout
    assert "BROKEN" not in plugins.stdout, plugins.stdout


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Replace ``recpipe.run.run`` and run the command line in this process; returns its exit status."""

    def status(run, *arguments: str) -> int:
        module = type(sys)("recpipe.run")
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "recpipe.run", module)
        monkeypatch.setattr(sys, "argv", ["recpipe", *arguments])
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
        with pytest.raises(SystemExit) as caught:
            command_line.main()
        assert isinstance(caught.value.code, int)
        return caught.value.code

    return status


def run_dir() -> Path:
    return Path(HydraConfig.get().runtime.output_dir)


def raising(fault: BaseException):
    def run(recipe, *_) -> None:
        raise fault

    return run


def test_statuses_of_a_run(job, capsys: pytest.CaptureFixture[str]) -> None:
    assert job(lambda recipe, *_: None) == 0
    assert job(raising(UserError("row 3: bad label"))) == 2
    assert capsys.readouterr().err == "error: row 3: bad label\n"
    assert job(raising(KeyboardInterrupt())) == 130


def test_a_bug_keeps_its_type(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = type(sys)("recpipe.run")
    module.run = raising(ZeroDivisionError("bug"))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "recpipe.run", module)
    monkeypatch.setattr(sys, "argv", ["recpipe"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ZeroDivisionError):
        command_line.main()


def test_a_sweep_runs_each_job_in_its_folder(job, tmp_path: Path) -> None:
    seen = []
    keep = lambda recipe, *_: seen.append((recipe.seed, run_dir()))  # noqa: E731
    assert job(keep, "trainer.max_steps=3", "-m", "seed=7,8") == 0
    assert [seed for seed, _ in seen] == [7, 8]
    assert len({folder for _, folder in seen}) == 2
    assert all((tmp_path / "multirun") in folder.parents for _, folder in seen)


def reported(*failing: BaseException) -> Callable[[DictConfig], None]:
    """A run that leaves a report; with seed=2, the first of ``failing``, and so on."""

    def run(recipe: DictConfig, *_) -> None:
        if 2 <= recipe.seed < 2 + len(failing):
            raise failing[recipe.seed - 2]
        write_json(run_dir() / "report.json", make_report().to_dict())

    return run


def test_a_sweep_goes_on_after_failed_jobs_and_ends_with_its_table(job, tmp_path: Path, capsys) -> None:
    failing = UserError("row 3: bad label"), UserError("row 9: another")
    assert job(reported(*failing), "-m", "seed=1,2,3,4", "hydra.sweep.dir=sweep") == 2
    said = capsys.readouterr()
    assert said.out.count("report: sweep/sweep.html") == 1
    assert "job 1 failed: row 3: bad label" in said.out
    jobs = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["jobs"]
    assert [j["state"] for j in jobs] == ["done", "failed", "failed", "done"]
    assert [j["exit_status"] for j in jobs] == [None, 2, 2, None]
    errors = [line for line in said.err.splitlines() if line.startswith(("error:", "  "))]
    assert errors == [
        "error: row 3: bad label",
        "error: row 9: another",
        "error: 2 of the sweep's jobs failed:",
        f"  {tmp_path}/sweep/1: seed=2 (row 3: bad label)",
        f"  {tmp_path}/sweep/2: seed=3 (row 9: another)",
    ]
    assert "error: row 3: bad label" in (tmp_path / "sweep" / "1" / "recpipe.log").read_text()
    assert job(reported(), "-m", "seed=1,2,3,4", "hydra.sweep.dir=sweep") == 0
    jobs = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["jobs"]
    assert {j["state"] for j in jobs} == {"done"}, "failures of the sweep before are forgotten"


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), ZeroDivisionError("bug")], ids=["Ctrl-C", "a bug"])
def test_a_sweep_that_breaks_off_has_its_table(job, tmp_path: Path, capsys, fault) -> None:
    stopped = isinstance(fault, KeyboardInterrupt)
    with nullcontext() if stopped else pytest.raises(ZeroDivisionError):
        assert job(reported(fault), "-m", "seed=1,2,3", "hydra.sweep.dir=sweep") == 130
    assert capsys.readouterr().out.count("report: sweep/sweep.html") == 1
    jobs = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["jobs"]
    assert [j["state"] for j in jobs] == (["done", "stopped"] if stopped else ["done", "failed", "done"])


def test_no_table_where_no_sweep_ran(job, tmp_path: Path, capsys) -> None:
    assert job(reported()) == 0
    assert job(reported(), "-m", "trainer.max_stepz=1,2", "hydra.sweep.dir=sweep") == 2
    assert "sweep.html" not in capsys.readouterr().out
    assert not list(tmp_path.glob("**/sweep.html"))


def test_a_runs_log_has_what_was_shown(job, tmp_path: Path, capsys) -> None:
    def run(recipe: DictConfig, *_) -> None:
        logging.getLogger("recpipe.anything").info("something")
        logging.getLogger("library").warning("careful")
        logging.getLogger("library").info("details")
        raise UserError("row 3: bad label")

    assert job(run, "hydra.run.dir=run") == 2
    said, written = capsys.readouterr(), (tmp_path / "run" / "recpipe.log").read_text()
    assert written == said.out + said.err
    assert [line[10:] for line in said.out.splitlines()] == [
        f"this run's directory: {tmp_path}/run",
        "loading torch",
        "something",
        "warning: careful",
    ]
    assert said.err == "error: row 3: bad label\n"


def test_a_run_has_a_folder_of_its_own_and_the_users_environment(job, tmp_path: Path) -> None:
    seen = []
    assert job(lambda recipe, *_: seen.append((run_dir(), os.environ.get("HYDRA_FULL_ERROR")))) == 0
    folder, full_error = seen[0]
    assert (tmp_path / "outputs") in folder.parents
    assert folder.is_dir()
    assert full_error is None


def test_missing_value_names_the_key(job, capsys: pytest.CaptureFixture[str]) -> None:
    assert job(lambda recipe, *_: recipe.data.path, "++data.path=???") == 2
    assert (
        capsys.readouterr().err == "error: data.path has no value in this recipe: set it, data.path=VALUE\n"
    )


@pytest.mark.soak  # composing is tested alone
def test_a_comparison_takes_knobs_of_its_plugins_as_a_run_does(cli: Cli) -> None:
    done = cli(
        "task=compare", "compare.plugins=[hotline]", "compare.repetitions=1", "compare.warmup=0",
        "plugins.hotline.sample=2", "data.samples=1000", "data.table_scale=0.01",
    )  # fmt: skip
    assert done.returncode == 2
    assert "row 'hotline': plugins.hotline.sample=2" in done.stderr
