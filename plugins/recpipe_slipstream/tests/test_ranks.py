"""Several trainers leave out the same inputs, and train what one process trains."""

from __future__ import annotations

from pathlib import Path

import pytest
from recpipe_slipstream.tests.test_plugin import KNOBS, ROOM

from tests.distributed.test_torchrun import alone, difference, together

COUNTS = ("dropped_samples", "hot_samples", "stale_rows", "sampled_inputs", "snapshots")


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        ("+plugin=[hotline,slipstream]", "plugins.slipstream.snapshot_every=12"),
        pytest.param(
            ("+plugin=slipstream", "plugins.slipstream.freeze_stale_rows=true"), marks=pytest.mark.soak
        ),
    ],
    ids=["hotline", "frozen"],
)
def test_two_trainers_train_what_one_does(recipe: tuple[str, ...], tmp_path: Path) -> None:
    """Each sees half of every batch, and counts the whole one. Gradients are added in another order, which
    may do what one rounding of the first weights does, and no more, as ``task=compare`` judges."""
    overrides = [*ROOM, *KNOBS, *recipe, "optim=sgd", "trainer.logger=null", "trainer.checkpoint_every=null"]
    expected = alone(tmp_path / "one", base=tuple(overrides))
    alone(tmp_path / "rounded", "task.nudge=true", base=tuple(overrides))
    report = together(tmp_path / "two", 2, base=tuple(overrides))
    ours, theirs = (r["plugins"]["slipstream"] for r in (report, expected))
    assert {name: ours[name] for name in COUNTS} == {name: theirs[name] for name in COUNTS}
    assert ours["dropped_samples"] > 0
    assert report["data"]["train_samples"] == expected["data"]["train_samples"]
    rounding = difference(tmp_path / "one", tmp_path / "rounded")
    assert rounding < 1e-3, "a bound that says something"
    assert difference(tmp_path / "one", tmp_path / "two") <= 4 * rounding
