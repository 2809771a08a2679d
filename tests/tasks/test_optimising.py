"""Sweepers that optimise: each job hands its figure of the report to them (``optimized_metric``)."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.plugins.sweeper import Sweeper

from recpipe import cli as command_line
from recpipe.errors import ThroughHydra, UserError
from recpipe.tasks import sweep_launcher as launcher
from recpipe.tasks.sweep_launcher import TorchrunLauncher
from recpipe.tasks.sweeps import optimized

REPORT = {
    "schema": 1,
    "recipe": {"seed": 3},
    "quality": {"auc": 0.75, "logloss": 0.5, "ne": None, "loss": float("nan")},
    "throughput": {"samples_per_second": 100, "step_ms": {"p50": 2.5}},
}


class Search(Sweeper):
    """Looks for the seed with the least figure; knows no more of jobs than what they return."""

    __module__ = "hydra_plugins.recpipe_search"

    def __init__(self, seeds: list[int], direction: Any = "minimize") -> None:
        self.seeds, self.direction = seeds, direction

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        self.folder = Path(str(config.hydra.sweep.dir))
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        found = []
        for number, seed in enumerate(self.seeds):
            jobs: Sequence[Sequence[str]] = [[*arguments, f"seed={seed}"]]
            (job,) = self.launcher.launch(jobs, initial_job_idx=number)
            value = job.return_value
            found.append(([float(part) for part in value] if isinstance(value, list) else float(value), seed))
        (self.folder / "best.json").write_text(json.dumps(min(found)))


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """``search(*words)``: a sweep of ``Search`` over seeds 5, 3 and 4 in ``sweep``, whose job with seed s has
    logloss s / 10 and AUC s / 5; returns the exit status."""
    for singleton in (Plugins, ConfigStore):  # registered for this test alone
        monkeypatch.setitem(Singleton._instances, singleton, singleton.instance())
    package = sys.modules.get("hydra_plugins") or ModuleType("hydra_plugins")
    monkeypatch.setitem(sys.modules, "hydra_plugins", package)
    monkeypatch.setattr(package, "recpipe_search", sys.modules[__name__], raising=False)
    monkeypatch.setitem(sys.modules, "hydra_plugins.recpipe_search", sys.modules[__name__])
    Plugins.instance().register(Search)
    target = {"_target_": "hydra_plugins.recpipe_search.Search", "seeds": [5, 3, 4]}
    store = ConfigStore.instance()
    for name, keys in (("search", {"direction": "minimize"}), ("blind", {})):
        store.store(group="hydra/sweeper", name=name, node=target | keys, provider="test")

    def run(recipe: Any, directory: Path, command_line: object) -> dict[str, Any]:
        if recipe.seed == 99:
            raise UserError("the loss is not finite")
        return {"quality": {"logloss": recipe.seed / 10, "auc": recipe.seed / 5}}

    monkeypatch.setattr("recpipe.run.run", run)
    monkeypatch.chdir(tmp_path)

    def status(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["recpipe", "-m", "hydra.sweep.dir=sweep", *words])
        with pytest.raises(SystemExit) as caught:
            command_line.main()
        assert isinstance(caught.value.code, int)
        return caught.value.code

    return status


def best() -> Any:
    return json.loads(Path("sweep/best.json").read_text())


def test_each_job_hands_its_figure_to_the_sweeper(search) -> None:
    assert search("hydra/sweeper=search", "optimized_metric=quality.logloss") == 0
    assert best() == [0.3, 3]


def test_of_several_figures_each(search) -> None:
    directions = "hydra.sweeper.direction=[minimize,maximize]"
    words = ("hydra/sweeper=search", directions, "optimized_metric=[quality.logloss,quality.auc]")
    assert search(*words) == 0
    assert best() == [[0.3, 0.6], 3]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            [],
            "error: hydra/sweeper=search optimises and optimized_metric is null: name the figure of ",
        ),
        (
            ["optimized_metric=[quality.logloss,quality.auc]"],
            "error: optimized_metric names 2 figures (quality.logloss, quality.auc) and hydra.sweeper.d",
        ),
        (["optimized_metric=quality.loglos"], "no such figure in report.json; did you mean quality.logloss?"),
        (["optimized_metric=[]"], "optimized_metric=[]: must have at least 1 item"),
        (["optimized_metric={a: 1}"], "error: optimized_metric={'a': 1}: must be "),
        (["optimized_metric=quality.logloss", "hydra.sweeper.seeds=[3,99]"], "(the loss is not finite)"),
    ],
)
def test_mistakes_end_the_sweep_at_once_in_a_line(search, capfd, words, message) -> None:
    assert search("hydra/sweeper=search", *words) == 2
    said = capfd.readouterr().err
    assert message in said
    assert "Traceback" not in said
    assert not Path("sweep/best.json").exists()


def test_what_a_sweeper_raises_itself_is_one_line(search, capfd) -> None:
    """A sweeper of which nothing says that it optimises gets what there is, None."""
    assert search("hydra/sweeper=blind") == 2
    said = capfd.readouterr().err
    assert "error: hydra/sweeper=blind: float() argument must be" in said
    assert "Traceback" not in said


def test_a_sweep_that_does_not_optimise_needs_no_figure(search) -> None:
    assert search("seed=1,2") == 0
    assert not Path("sweep/best.json").exists()


TORCHRUN = """
import json, sys
from pathlib import Path
words = dict(w.split("=", 1) for w in sys.argv[2:] if "=" in w)
seed = int(words["seed"])
if seed != 4:
    Path(words["hydra.run.dir"].strip("'")).joinpath("report.json").write_text(
        json.dumps({"quality": {"logloss": seed / 10}})
    )
"""


def test_jobs_under_torchrun_hand_over_their_figure(search, tmp_path, monkeypatch, capfd) -> None:
    (tmp_path / "torchrun.py").write_text(TORCHRUN)
    monkeypatch.setattr(launcher, "TORCHRUN", f"{tmp_path / 'torchrun.py'} {{}}")
    monkeypatch.setattr(TorchrunLauncher, "environment", TorchrunLauncher.environment)
    words = ("hydra/launcher=torchrun", "hydra/sweeper=search")
    assert search(*words) == 2
    assert "error: hydra/sweeper=search optimises and optimized_metric is null" in capfd.readouterr().err
    words = (*words, "optimized_metric=quality.logloss")
    assert search(*words, "hydra.sweeper.seeds=[5,3]") == 0
    assert best() == [0.3, 3]
    assert search(*words) == 2
    assert "2: report.json cannot be read: " in capfd.readouterr().err


def test_figures_by_their_paths() -> None:
    assert optimized(["quality.logloss"], REPORT) == 0.5
    assert optimized(["throughput.step_ms.p50", "throughput.samples_per_second"], REPORT) == [2.5, 100.0]
    for name in ("quality.ne", "quality.loss"):
        with pytest.raises(
            UserError, match=f"optimized_metric={name}: this run's report has no finite value"
        ):
            optimized([name], REPORT)
    for name in ("recipe.seed", "quality", "logloss"):
        with pytest.raises(ThroughHydra, match="no such figure in report.json; (did you mean|choose one of)"):
            optimized([name], REPORT)


def test_optuna_itself(search) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="needs hydra-optuna-sweeper")
    words = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=6", "hydra.sweeper.n_jobs=1", "seed=range(2,5)")
    assert search(*words, "optimized_metric=quality.logloss", "hydra/sweeper/sampler=grid") == 0
    assert "best_value: 0.2" in Path("sweep/optimization_results.yaml").read_text()
