"""Every callback of the installed Lightning: it works in a real run, or is refused in a line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning.pytorch.callbacks as lightnings
import pytest

import recpipe
from recpipe.config.compose import compose
from recpipe.errors import UserError
from recpipe.plugin.errors import PluginError
from recpipe.run import run
from recpipe.training.callbacks import REFUSED, make_callbacks

LIGHTNING = "lightning.pytorch.callbacks"
SMALL = ("data.samples=640", "data.batch_size=64", "data.tables={a: 30, b: 8}", "model.embedding_dim=4")
SMALLER = (*SMALL, "model.bottom=[4]", "model.top=[4]", "trainer.progress=false", "trainer.backend=plain")
STEPS = 8
REFUSED_HERE = {
    "BackboneFinetuning": {},
    "BaseFinetuning": {},
    "BasePredictionWriter": {},
    "BatchSizeFinder": {},
    "EMAWeightAveraging": {"decay": 0.9},
    "GradientAccumulationScheduler": {"scheduling": {0: 2}},
    "LearningRateFinder": {},
    "ModelPruning": {"pruning_fn": "l1_unstructured"},
    "ProgressBar": {},
    "RichProgressBar": {},
    "StochasticWeightAveraging": {"swa_lrs": 0.1},
    "TQDMProgressBar": {},
    "WeightAveraging": {},
}
"""Those that are refused, with arguments that they take."""


def sizes(batch: Any) -> int:
    """What ThroughputMonitor asks of a batch."""
    SEEN.append(batch.size)
    return int(batch.size)


SEEN: list[int] = []
HERE = {"_target_": "hydra.utils.get_method", "path": f"{__name__}.sizes"}
WORKING: dict[str, dict[str, Any]] = {
    "Callback": {},
    "Checkpoint": {},
    "DeviceStatsMonitor": {"cpu_stats": False},
    "EarlyStopping": {"monitor": "val/logloss", "stopping_threshold": 100.0},
    "LambdaCallback": {},
    "LearningRateMonitor": {},
    "ModelCheckpoint": {"monitor": "val/auc", "filename": "best"},
    "ModelSummary": {},
    "OnExceptionCheckpoint": {"dirpath": "kept"},
    "RichModelSummary": {},
    "SpikeDetection": {},
    "ThroughputMonitor": {"batch_size_fn": HERE},
    "Timer": {"duration": {"hours": 1}},
}


def trained(folder: Path, name: str, arguments: dict[str, Any], *words: str) -> dict[str, Any]:
    wanted = {"_target_": f"{LIGHTNING}.{name}", **arguments}
    text = re.sub(r"'([\w.]+)':", r"\1:", str([wanted])).replace("False", "false")
    words = (*SMALLER, f"trainer.callbacks={text}", *words)
    with recpipe.train(None, None, *words, output=folder, quiet=True) as run:
        return run.report


def test_each_of_the_installed_lightning_is_decided() -> None:
    """A class that a later Lightning brings is tried in a run, and put into one of the tables here."""
    known = {"EMAWeightAveraging", "WeightAveraging"}  # new in Lightning 2.6
    assert {*lightnings.__all__} | known == {*REFUSED_HERE, *WORKING} | known


@pytest.mark.parametrize("name", [*REFUSED_HERE])
def test_refused_in_a_line_that_says_why_and_what_instead(tmp_path, name) -> None:
    if not hasattr(lightnings, name):
        pytest.skip("a later Lightning has it")
    with pytest.raises(UserError, match=rf"^trainer.callbacks\[0\]: {name} cannot be used: ") as told:
        make_callbacks([{"_target_": f"{LIGHTNING}.{name}", **REFUSED_HERE[name]}], tmp_path)
    assert "\n" not in str(told.value)


class Averaged(lightnings.StochasticWeightAveraging):
    """A user's own, made from one that is refused."""


def test_what_is_made_from_a_refused_one_is_refused(tmp_path) -> None:
    for target in (f"{__name__}.Averaged", f"{__name__}.averaged"):
        with pytest.raises(UserError, match="Averaged cannot be used: it averages the dense part alone"):
            make_callbacks([{"_target_": target, "swa_lrs": 0.1}], tmp_path)


def test_of_a_plugin_in_a_line_that_names_it(install, tmp_path) -> None:
    code = """
from lightning.pytorch.callbacks import StochasticWeightAveraging
from recpipe.plugin import Contribution, Plugin

class P(Plugin):
    api = (2, 0)

    def contribute(self, ctx):
        return Contribution(callbacks=[StochasticWeightAveraging(swa_lrs=0.1)])
"""
    install("averages", "# @package plugins.averages\n{}\n", code)
    wrong = r"^plugin averages \(.*\), part averages.StochasticWeightAveraging: Stoch.*the dense part alone"
    for words in ([], ["task=plan"]):
        with pytest.raises(PluginError, match=wrong):
            run(compose([*SMALLER, "+plugin=averages", *words]), tmp_path)


def averaged(swa_lrs: float) -> Averaged:
    return Averaged(swa_lrs=swa_lrs)


def test_each_refusal_is_of_a_class_of_lightning() -> None:
    assert {name for name in REFUSED if not hasattr(lightnings, name)} <= {"WeightAveraging"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The quality without callbacks."""
    with recpipe.train(None, None, *SMALLER, quiet=True) as run:
        quality: dict[str, Any] = run.report["quality"]
        return quality


@pytest.mark.parametrize("name", [*WORKING])
def test_works_in_a_run(tmp_path, monkeypatch, capfd, caplog, plain, name) -> None:
    monkeypatch.chdir(tmp_path)
    SEEN.clear()
    stops = name == "EarlyStopping"
    words = ("trainer.eval_every=1", f"trainer.max_epochs={1 + stops}")
    report = trained(tmp_path / "run", name, WORKING[name], *words)
    assert report["history"][-1]["step"] == STEPS, "of the first epoch"
    assert report["quality"] == plain
    if name == "ModelCheckpoint":
        assert len([*(tmp_path / "run" / "checkpoints").glob("best*")]) == 1
    if name in ("ModelSummary", "RichModelSummary"):
        assert "Trainable params" in "".join(capfd.readouterr()) + caplog.text
    if name == "ThroughputMonitor":
        assert SEEN[:STEPS] == [64] * STEPS


@pytest.mark.parametrize("name", ["DeviceStatsMonitor", "LearningRateMonitor"])
def test_what_needs_a_logger_says_so(tmp_path, name) -> None:
    with pytest.raises(
        UserError, match=rf"trainer.callbacks: .*{name}.* \(trainer.logger=csv is one\)$"
    ) as told:
        trained(tmp_path, name, WORKING[name], "trainer.logger=null")
    assert "\n" not in str(told.value)


def test_a_spike_that_is_found_ends_the_run_in_a_line(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(lightnings.SpikeDetection, "_is_spike", lambda *_: True)
    with pytest.raises(UserError, match="trainer.callbacks: Training spike detected in batch 0"):
        trained(tmp_path, "SpikeDetection", {"warmup": 0})
