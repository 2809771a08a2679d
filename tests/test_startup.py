"""How soon a run trains: what it does not import before its first step, and the figure in the report."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from time import perf_counter

import pytest

from recpipe.common import process
from recpipe.config.compose import compose
from recpipe.run import run

SMALL = (
    "data.samples=4096",
    "data.table_scale=0.001",
    "trainer.max_steps=1",
    "trainer.progress=false",
    "trainer.logger=null",
    "trainer.checkpoint_every=null",
)
LATER = (
    "jinja2",
    "pyarrow",
    "matplotlib.backends.backend_svg",
    "tensorboard",
    "recpipe.report.html",
    "recpipe.report.plots",
    "recpipe.report.terminal",
    "recpipe.tasks.compare",
    "recpipe.tasks.plugins",
)
"""What is for the end of a run, or for other runs."""

TO_FIRST_STEP = f"""
import gc
import sys
from recpipe import cli
from recpipe.tasks import doctor

def before_torch():
    print("torch imported:", "torch" in sys.modules)
    from recpipe.training.recorder import Recorder
    Recorder.on_train_batch_end = stop

doctor.check_versions = before_torch

def stop(*_):
    print("loaded:", *(name for name in {LATER} if name in sys.modules))
    raise SystemExit

try:
    cli.main()
finally:
    print("kept from the collector:", gc.get_freeze_count() > 200_000, gc.isenabled())
"""


@pytest.mark.soak  # of time, and not of a result
def test_first_step_waits_for_no_import_that_it_does_not_use(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TO_FIRST_STEP, *SMALL, f"hydra.run.dir={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout.splitlines()
    assert said[-2:-1] == ["loaded:"], done.stderr
    assert said[1].endswith("  loading torch")
    assert said[2] == "torch imported: False", "there is something to read before that takes its seconds"
    assert said[-1] == "kept from the collector: True True", "at its end it looks at all that was imported"


def test_first_step_is_timed_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = perf_counter()
    monkeypatch.setattr(process, "_imported", began - 100)
    seconds = [
        run(compose([*SMALL]), tmp_path / name)["throughput"]["first_step_seconds"]
        for name in ("first", "second")
    ]
    assert 100 < seconds[0] < 100 + perf_counter() - began
    assert 0 < seconds[1] < perf_counter() - began, "a further run in the process has its own start"


def test_without_steps_there_is_no_first_one(tmp_path: Path) -> None:
    recipe = [*SMALL, "trainer.checkpoint_every=1", f"trainer.checkpoint_dir={tmp_path / 'ckpt'}"]
    run(compose(recipe), tmp_path / "a")
    report = run(compose([*recipe, f"resume={tmp_path / 'ckpt'}"]), tmp_path / "b")
    assert report["throughput"]["first_step_seconds"] is None
