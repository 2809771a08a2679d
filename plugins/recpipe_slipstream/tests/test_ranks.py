"""Several trainers leave out the same inputs, and train what one process trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from recpipe_slipstream.tests.test_plugin import KNOBS, ROOM

from recpipe.config import compose
from recpipe.run import run
from recpipe.tasks.compare_run import parameter_difference
from tests.conftest import ROOT

COUNTS = ("dropped_samples", "hot_samples", "stale_rows", "sampled_inputs", "snapshots")


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        ("+plugin=[hotline,slipstream]", "plugins.slipstream.snapshot_every=12"),
        ("+plugin=slipstream", "plugins.slipstream.freeze_stale_rows=true"),
    ],
    ids=["hotline", "frozen"],
)
def test_two_trainers_train_what_one_does(recipe: tuple[str, ...], tmp_path: Path) -> None:
    """Each sees half of every batch, and counts the whole one."""
    overrides = [*ROOM, *KNOBS, *recipe, "optim=sgd", "trainer.logger=null", "trainer.checkpoint_every=null"]
    expected = run(compose([*overrides, f"task.export_parameters={tmp_path / 'one'}"], tmp_path))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "recpipe", *overrides, f"task.export_parameters={tmp_path / 'two'}"]
    source = os.pathsep.join([str(ROOT), str(ROOT / "plugins"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    (tmp_path / "run").mkdir()
    done = subprocess.run(
        command, cwd=tmp_path / "run", env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("run/outputs/*/*/report.json")
    report = json.loads(file.read_text(encoding="utf-8"))
    ours, theirs = (r["plugins"]["slipstream"] for r in (report, expected))
    assert {name: ours[name] for name in COUNTS} == {name: theirs[name] for name in COUNTS}
    assert ours["dropped_samples"] > 0
    assert report["data"]["train_samples"] == expected["data"]["train_samples"]
    assert parameter_difference(tmp_path / "one", tmp_path / "two") < 1e-5
