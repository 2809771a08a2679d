"""However a plugin's code ends, a run ends as a whole, or with an error that names plugin and part."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from recpipe.config.compose import compose
from recpipe.errors import UserError
from recpipe.plugin.errors import PluginError, PluginFault
from recpipe.run import run
from recpipe.training.progress import Extent
from tests.processes import Child

CODE = (Path(__file__).parent / "leaver.py").read_text(encoding="utf-8")
YAML = "# @package plugins.leaver\nplace: nowhere\nway: StopIteration\nalters: false\n"
SMALL = (
    "+plugin=leaver",
    "data=synthetic",
    "data.samples=1000",
    "data.eval_fraction=0.2",
    "data.table_scale=0.01",
    "data.batch_size=64",
    "model.embedding_dim=4",
    "trainer.max_epochs=1",
    "trainer.progress=false",
    "trainer.checkpoint_every=null",
    "trainer.backend=plain",
)
STEPS = 13
PLACES = {
    "__init__": "__init__",
    "contribute": "contribute",
    "stream": "leaver.stream",
    "batch": "leaver.batch",
    "order": "leaver.Order.batches",
    "step": "leaver.step",
    "on_train_batch_start": "leaver.Hooks.on_train_batch_start",
    "on_validation_batch_end": "leaver.Hooks.on_validation_batch_end",
    "split": "leaver.Splits.split",
    "keep": "leaver.Skips.keep",
    "update": "leaver.Skips.update",
    "policy": "leaver.Own.policy",
    "admit": "leaver.Own.policy.admit",
    "encode": "leaver.Codes.cold.encode",
}
"""The part that a fault at each place is blamed on."""
GENERATORS = ("stream", "order", "step")
TIERED = {"policy", "admit", "encode", "split"}


@pytest.fixture(autouse=True)
def leaver(install) -> None:
    install("leaver", YAML, CODE)


def trained(folder: Path, *overrides: str) -> dict:
    return run(compose([*SMALL, *overrides]), folder / "run")


def left(folder: Path, place: str, way: str, *more: str) -> PluginError:
    tiers = ["tiers=host", "tiers.resident_bytes=10%"] if place in TIERED else []
    with pytest.raises(PluginError) as caught:
        trained(folder, f"plugins.leaver.place={place}", f"plugins.leaver.way={way}", *tiers, *more)
    return caught.value


@pytest.mark.parametrize("place", PLACES)
def test_an_end_of_an_iteration_names_plugin_and_part(place: str, tmp_path: Path) -> None:
    fault = left(tmp_path, place, "StopIteration")
    part = PLACES[place]
    raised = "RuntimeError: generator raised StopIteration" if place in GENERATORS else "StopIteration"
    assert str(fault).startswith(f"plugin leaver (leaver_pkg 1.0), part {part}, raised {raised}")
    assert "leaver_pkg" in str(fault).partition("raised")[2], "the file and the line"
    assert isinstance(fault, PluginFault)


@pytest.mark.parametrize("place", ["batch", "on_train_batch_start", "contribute"])
@pytest.mark.parametrize("way", ["SystemExit", "GeneratorExit", "KeyboardInterrupt", "ValueError"])
def test_other_ways_out(place: str, way: str, tmp_path: Path) -> None:
    said = str(left(tmp_path, place, way))
    assert f"part {PLACES[place]}, raised {way}" in said
    assert "\n" not in said


def test_a_plugins_own_line_for_the_user_stays_one(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        trained(tmp_path, "plugins.leaver.place=batch", "plugins.leaver.way=UserError")
    assert str(caught.value) == "plugin leaver (leaver_pkg 1.0), part leaver.batch: this cannot be"


def test_an_iterator_that_ends_early_is_told_by_its_samples(tmp_path: Path) -> None:
    fault = left(tmp_path, "mapped", "StopIteration")
    assert "part leaver.stream, got 256 samples and passed 192 on" in str(fault)
    assert "declare Invariant.SAMPLE_SET" in str(fault)


def test_leaving_samples_out_must_be_declared(tmp_path: Path) -> None:
    assert "got 800 samples and passed 384 on" in str(left(tmp_path, "half", "-"))
    report = trained(tmp_path, "plugins.leaver.place=half", "plugins.leaver.alters=true")
    assert report["data"]["train_samples"] == 384


def test_a_callback_stops_training_only_if_its_plugin_says_so(tmp_path: Path) -> None:
    fault = left(tmp_path, "should_stop", "-")
    assert "part leaver.Hooks.on_train_batch_end, ended training after step 1" in str(fault)
    report = trained(tmp_path, "plugins.leaver.place=should_stop", "plugins.leaver.alters=true")
    assert report["data"]["train_samples"] == 64


@pytest.mark.parametrize(("place", "said"), [("report", "raised SystemExit: 0"), ("figures", "no text")])
def test_a_reporter_that_fails_costs_its_own_figures(place: str, said: str, tmp_path: Path, caplog) -> None:
    report = trained(tmp_path, f"plugins.leaver.place={place}", "plugins.leaver.way=SystemExit")
    assert report["plugins"] == {"leaver": {"other": 2}}
    assert said in report["unreported"]["leaver"]
    assert "part leaver.report" in report["unreported"]["leaver"]
    assert json.loads((tmp_path / "run/report.json").read_text()) == report
    assert "Figures are missing: plugin leaver" in (tmp_path / "run/report.html").read_text()


def test_nothing_is_said_of_a_plugin_that_ends_as_it_should(tmp_path: Path) -> None:
    report = trained(tmp_path)
    assert report["plugins"] == {"leaver": {"steps": STEPS, "other": 2}}
    assert report["unreported"] == {}


def test_a_thread_left_running_is_named(tmp_path: Path, capfd) -> None:
    try:
        trained(tmp_path, "plugins.leaver.place=thread")
        said = "".join(capfd.readouterr())
        assert "plugin leaver (leaver_pkg 1.0), part leaver.report, has left thread 'side work'" in said
    finally:
        sys.modules["leaver_pkg.plugin"].release.set()


@pytest.mark.soak  # it waits for five seconds
def test_a_thread_left_running_does_not_keep_the_process(tmp_path: Path) -> None:
    overrides = [*SMALL, "plugins.leaver.place=thread", "trainer.max_steps=2"]
    done = Child(tmp_path / "cli", *overrides, environment={"PYTHONPATH": str(tmp_path / "site")}).ended()
    assert done.returncode == 0
    assert "has left thread 'side work' running" in done.stdout + done.stderr


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_validation_batch_end"])
def test_a_users_callback_cannot_end_an_epoch_unseen(hook: str, tmp_path: Path, monkeypatch) -> None:
    def ends(self, trainer, *_):
        if trainer.global_step >= 3:
            raise StopIteration

    monkeypatch.setattr(Extent, hook, ends, raising=False)  # any callback without a plugin
    said = "with 9 of its 13 batches untrained, after step 3" if "train" in hook else "before its last batch"
    with pytest.raises(UserError, match=said):
        trained(tmp_path)
