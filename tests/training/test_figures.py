"""Figures in Lightning's loggers and before the callbacks that monitor them; both as a recipe names them."""

from __future__ import annotations

import csv
import math
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger

from recpipe.checkpoint import manifest
from recpipe.checkpoint import table_io as checkpoint
from recpipe.config.compose import compose
from recpipe.distributed.ranks import Channel, Ranks
from recpipe.errors import UserError
from recpipe.report import run_page
from recpipe.run import run
from recpipe.training import recorder
from recpipe.training.callbacks import make_callbacks
from recpipe.training.trainer import AgreeingStrategy, make_logger
from tests.tables.samples import CPU
from tests.training.test_trainer import EPOCH, SMALL

LIGHTNING = "lightning.pytorch.callbacks"
Rows = list[dict[str, str]]
Reported = Callable[..., dict[str, Any]]


@pytest.fixture
def reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reported:
    """``reported(*overrides)``: the report of a run in this process, in ``tmp_path``."""
    monkeypatch.setattr(run_page, "write", lambda content, folder: None)
    for module in (checkpoint, manifest):
        monkeypatch.setattr(module, "sync", lambda path: None)

    def train(*overrides: str) -> dict[str, Any]:
        return run(compose([*SMALL, "trainer.checkpoint_every=null", *overrides]), tmp_path)

    return train


def metrics(folder: Path) -> Rows:
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def column(rows: Rows, name: str) -> dict[int, float]:
    """Step -> value."""
    return {int(row["step"]): float(row[name]) for row in rows if row[name]}


class Losses(L.Callback):
    """Every step's loss, as the training step returns it."""

    seen: list[float]

    def on_train_start(self, *_: Any) -> None:
        Losses.seen = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        Losses.seen.append(float(outputs["loss"]))


def callback(name: str, **arguments: Any) -> str:
    values = {"_target_": name, **arguments}
    return "trainer.callbacks=[{" + ", ".join(f"{k}: {v}" for k, v in values.items()) + "}]"


def test_figures_stand_under_the_step_that_they_are_of(reported, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(recorder, "LOG_EVERY", 10)
    report = reported("trainer.logger=csv", "trainer.max_steps=23", callback(f"{__name__}.Losses"))
    rows = metrics(tmp_path / "logs")
    history = {point["step"]: point for point in report["history"]}
    assert list(history) == [12, 23]
    for name in ("auc", "logloss", "ne"):
        assert column(rows, f"val/{name}") == {step: point[name] for step, point in history.items()}
    losses = column(rows, "train/loss")
    assert list(losses) == [10, 12, 20, 23]
    for first, last in ((0, 10), (10, 12), (12, 20), (20, 23)):
        assert losses[last] == pytest.approx(np.mean(Losses.seen[first:last]), rel=1e-6)
    assert list(column(rows, "train/samples_per_second")) == list(losses)
    assert min(column(rows, "train/samples_per_second").values()) > 0
    recipe = yaml.safe_load((tmp_path / "logs" / "hparams.yaml").read_text())
    assert recipe["data"]["batch_size"] == 64
    assert recipe["trainer"]["max_steps"] == 23


def test_a_run_shorter_than_the_interval_leaves_figures(reported, tmp_path) -> None:
    reported("trainer.logger=csv", "trainer.max_steps=3", "data.eval_fraction=0")
    (row,) = metrics(tmp_path / "logs")
    assert row["step"] == "3"
    assert math.isfinite(float(row["train/loss"]))


BY_KEY = "trainer.early_stopping={monitor: val/logloss, patience: 1, min_delta: 9}"
BY_CLASS = callback(f"{LIGHTNING}.EarlyStopping", monitor="val/logloss", patience=1, min_delta=9)


@pytest.mark.parametrize("stopping", [BY_KEY, BY_CLASS])
def test_early_stopping_ends_training_and_leaves_a_checkpoint(reported, tmp_path, capsys, stopping) -> None:
    report = reported("trainer.eval_every=5", "trainer.checkpoint_every=24", stopping)
    assert [point["step"] for point in report["history"]] == [5, 10]
    assert report["data"]["train_samples"] == 640
    assert "stopped early after step 10: Monitored metric val/logloss did not" in capsys.readouterr().out
    assert checkpoint.newest(tmp_path).name == "step-00000010.ckpt"


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        ("trainer.best_checkpoint={monitor: val/auc, mode: min}", "best"),
        (callback(f"{LIGHTNING}.ModelCheckpoint", monitor="val/auc", mode="min", filename="best"), "best"),
    ],
)
def test_the_best_checkpoint_is_that_of_the_best_evaluation(reported, tmp_path, wanted, name) -> None:
    """Best is least here, so that it is not the last one."""
    report = reported("trainer.eval_every=5", wanted)
    step = min(report["history"], key=lambda point: point["auc"])["step"]
    assert step < EPOCH
    assert [file.name for file in (tmp_path / "checkpoints").iterdir()] == [f"{name}.ckpt"]
    assert manifest.read_manifest(checkpoint.newest(tmp_path / "best")).step == step


def test_the_best_checkpoint_is_known_by_its_figure_alone(reported, tmp_path) -> None:
    report = reported("trainer.eval_every=5", "trainer.best_checkpoint=val/logloss")
    step = min(report["history"], key=lambda point: point["logloss"])["step"]
    assert manifest.read_manifest(checkpoint.newest(tmp_path / "best")).step == step
    with pytest.raises(UserError, match="no best checkpoint there; a run keeps one with trainer.best_ch"):
        checkpoint.newest(tmp_path / "logs" / "best")


@pytest.mark.parametrize("key", ["trainer.early_stopping=val/mine", "trainer.best_checkpoint=lr/dense"])
def test_a_figure_of_no_known_direction_needs_one(reported, key) -> None:
    with pytest.raises(UserError, match="which way .* is better is not known: set mode to min or max"):
        reported(key)


def test_parts_of_the_data_end_early(reported) -> None:
    """The same as of data that have no more: steps, samples, and the bits of the figures."""
    limited = reported("trainer.limit_train_batches=7", "trainer.limit_val_batches=0.5")
    assert (limited["data"]["train_samples"], limited["data"]["eval_samples"]) == (7 * 64, 3 * 64)
    assert [point["step"] for point in limited["history"]][-1] == 7
    whole = reported("trainer.max_steps=7", "trainer.limit_val_batches=3", "overwrite=true")
    assert whole["quality"] == limited["quality"]
    with pytest.raises(UserError, match=r"0\.01 of the .* batches of eval are none: raise the trainer.limit"):
        reported("trainer.limit_val_batches=0.01")


def test_a_trial_writes_nothing_but_its_report(reported, tmp_path) -> None:
    report = reported("trainer.fast_dev_run=2", "trainer.checkpoint_every=1", "trainer.logger=csv")
    assert [point["step"] for point in report["history"]] == [2]
    assert (report["data"]["train_samples"], report["data"]["eval_samples"]) == (128, 128)
    assert not (tmp_path / "checkpoints").exists()
    assert not (tmp_path / "logs").exists()


class Rates(L.Callback):
    """The dense optimizer's learning rate in every step."""

    seen: list[float]

    def on_train_start(self, *_: Any) -> None:
        Rates.seen = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        Rates.seen.append(trainer.optimizers[0].param_groups[0]["lr"])


def test_the_dense_rate_falls_on_a_plateau(reported) -> None:
    plateau = callback("recpipe.training.plateau.ReduceLROnPlateau", patience=0, factor=0.5, threshold=0.9)
    both = plateau.removesuffix("]") + ", {_target_: " + f"{__name__}.Rates" + "}]"
    reported("trainer.eval_every=5", "optim.dense.lr=0.02", both)
    assert Rates.seen == [0.02] * 10 + [0.01] * 5 + [0.005] * 5 + [0.0025] * 5


def test_a_figure_that_nobody_logs_is_named(reported) -> None:
    with pytest.raises(UserError, match="EarlyStopping monitors 'val_loss', .* train/loss, .*, val/logloss"):
        reported(callback(f"{LIGHTNING}.EarlyStopping", monitor="val_loss"))


class Kept(CSVLogger):
    """A logger of the user's own."""


def test_any_logger_by_its_class(reported, tmp_path) -> None:
    own = f"trainer.logger={{_target_: {__name__}.Kept, save_dir: {tmp_path}, name: mine, version: a}}"
    reported(own, "trainer.max_steps=2")
    assert list(column(metrics(tmp_path / "mine" / "a"), "val/auc")) == [1, 2]


def test_mlflow_writes_into_the_runs_directory_or_to_the_users_server(tmp_path, monkeypatch) -> None:
    made: list[dict[str, str]] = []

    def logger(name: str, **arguments: str) -> None:
        made.append(arguments)

    monkeypatch.setattr("recpipe.training.trainer.MLFlowLogger", logger)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    make_logger("mlflow", tmp_path)
    database, artifacts = f"sqlite:///{tmp_path}/mlflow.db", f"file://{tmp_path}/mlruns"
    assert made.pop() == {"tracking_uri": database, "artifact_location": artifacts}
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    make_logger("mlflow", tmp_path)
    assert made.pop() == {"tracking_uri": "http://mlflow:5000"}


def test_mlflow_itself_keeps_figures_in_its_database(tmp_path, monkeypatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    logger = make_logger("mlflow", tmp_path)
    assert logger is not None
    logger.log_metrics({"val/auc": 0.75}, step=7)
    logger.finalize("success")
    rows = sqlite3.connect(tmp_path / "mlflow.db").execute("select key, value, step from metrics").fetchall()
    assert rows == [("val/auc", 0.75, 7)]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_logger_whose_package_is_missing_is_told_in_one_line(tmp_path, monkeypatch, name) -> None:
    monkeypatch.setattr("lightning.pytorch.loggers.wandb._WANDB_AVAILABLE", False)
    monkeypatch.setattr("lightning.pytorch.loggers.mlflow._MLFLOW_AVAILABLE", False)
    for missing in ("_TENSORBOARD_AVAILABLE", "_TENSORBOARDX_AVAILABLE"):
        monkeypatch.setattr(f"lightning.fabric.loggers.tensorboard.{missing}", False)
    with pytest.raises(UserError, match=rf"^trainer.logger={name} needs .*: pip install {name}"):
        make_logger(name, tmp_path)


def test_tensorboard_where_it_is_installed(reported, tmp_path) -> None:
    pytest.importorskip("tensorboard", reason="the tensorboard package is not installed")
    reported("trainer.logger=tensorboard", "trainer.max_steps=2")
    assert list((tmp_path / "logs").glob("events.*"))


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"monitor": "val/auc"}, r"trainer.callbacks\[0\].*say which class"),
        ({"_target_": f"{LIGHTNING}.EarlyStoping"}, r"cannot make .*EarlyStoping: "),
        ({"_target_": "nowhere.Callback"}, "No module named 'nowhere'"),
        ({"_target_": f"{LIGHTNING}.EarlyStopping"}, "missing 1 required positional argument: 'monitor'"),
        ({"_target_": "datetime.timedelta"}, "makes a timedelta, not a lightning.*Callback"),
        ({"_target_": "recpipe.training.plateau.ReduceLROnPlateau", "factor": 2}, "Factor should be < 1"),
    ],
)
def test_what_is_no_callback_is_refused_with_one_line(tmp_path, chosen, words) -> None:
    with pytest.raises(UserError, match=words) as told:
        make_callbacks([chosen], tmp_path)
    assert "\n" not in str(told.value)


class Pair(Channel):
    """Two trainers of which this one is the first; the other sends ``other``."""

    def __init__(self, other: np.ndarray) -> None:
        super().__init__((0, 1), 0, None, Ranks().emulation)
        self.other = other

    def gather(self, part: np.ndarray) -> list[np.ndarray]:
        return [part, self.other]


def test_callbacks_decide_as_those_of_all_trainers() -> None:
    other = AgreeingStrategy(CPU, Pair(np.array([False])))
    assert [other.reduce_boolean_decision(True, all=whole) for whole in (True, False)] == [False, True]
    theirs = np.frombuffer(b'"there"', np.uint8)
    assert AgreeingStrategy(CPU, Pair(theirs)).broadcast("here", src=1) == "there"
    assert AgreeingStrategy(CPU, Pair(theirs)).broadcast("here") == "here"
