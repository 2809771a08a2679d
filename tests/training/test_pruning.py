"""Searches that end runs early: callbacks of Python's callers, Optuna's and Ray Tune's among them."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import EMAWeightAveraging

import recpipe
from recpipe.errors import UserError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "compare.md"
SMALL = ("data.samples=2000", "data.batch_size=128", "trainer.eval_every=4", "trainer.checkpoint_every=null")


class Pruned(Exception):
    """As a search has one."""


class Prunes(L.Callback):
    """Gives a run up at its second evaluation."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seen.append(float(trainer.callback_metrics["val/auc"]))
        if len(self.seen) == 2:
            raise Pruned("worse than the others")


def test_what_a_callback_raises_ends_the_run_and_comes_out(tmp_path: Path) -> None:
    callback = Prunes()
    with pytest.raises(Pruned, match="worse than the others"):
        recpipe.train(None, None, *SMALL, callbacks=[callback], output=tmp_path / "a", quiet=True)
    assert len(callback.seen) == 2
    assert "ended at step 8: Pruned: worse than the others" in (tmp_path / "a" / "recpipe.log").read_text()
    assert not (tmp_path / "a" / "report.json").exists()
    # The process has let go of everything: the next trial runs in the same folder.
    with recpipe.train(None, None, *SMALL, output=tmp_path / "a", quiet=True) as run:
        assert run.report["quality"]["auc"] > 0


@pytest.mark.parametrize(
    ("callback", "words"),
    [(print, "callbacks[0]: builtin_function_or_method is no"), (EMAWeightAveraging(), "trainer.ema.decay")],
)
def test_what_is_no_callback_or_would_do_something_else_is_refused(callback: Any, words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        recpipe.train(None, None, *SMALL, callbacks=[callback], quiet=True)


def program(package: str, folder: Path) -> Path:
    """The page's program for a package."""
    programs = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (found,) = (text for text in programs if f"import {package}\n" in text)
    (folder / "search.py").write_text(found)
    return folder / "search.py"


def test_optuna_prunes_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("optuna_integration", reason="needs optuna and optuna-integration")
    monkeypatch.chdir(tmp_path)
    study = runpy.run_path(str(program("optuna", tmp_path)))["study"]
    states = {trial.number: trial.state.name for trial in study.trials}
    assert set(states.values()) == {"COMPLETE", "PRUNED"}
    for number, state in states.items():
        folder = tmp_path / "trials" / str(number)
        assert (folder / "report.json").exists() == (state == "COMPLETE")
        assert ("TrialPruned" in (folder / "recpipe.log").read_text()) == (state == "PRUNED")


@pytest.mark.soak  # a cluster takes half a minute to start
def test_ray_tune_ends_trials_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray.tune", reason="needs ray[tune]")
    import ray

    monkeypatch.chdir(tmp_path)
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        found = runpy.run_path(str(program("tune", tmp_path)), run_name="__main__")["found"]
    finally:
        ray.shutdown()
    assert not found.errors
    ran = [len(result.metrics_dataframe) for result in found]
    assert len(ran) == 6
    assert min(ran) < max(ran)
