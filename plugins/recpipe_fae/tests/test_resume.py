"""A run that is stopped and resumed takes the same decisions and ends with the same bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from recpipe.errors import UserError
from recpipe.plugin.errors import PluginError
from recpipe.testing import SMALL, Trained, train

RECIPE = (
    *SMALL,
    "+plugin=fae",
    "plugins.fae.rate=30",
    "plugins.fae.phases=always",
    "plugins.fae.loss_samples=300",
    "data.samples=5000",
    "data.batch_size=100",
    "data.table_scale=1",
    "data.tables={a: 50, b: 500, c: 2000}",
    "tiers=host",
    "tiers.resident_bytes=30%",
    "trainer.max_steps=null",
    "trainer.max_epochs=2",
    "trainer.eval_every=9",
    "trainer.progress=false",
    "trainer.logger=null",
)
"""Two epochs of 41 batches, several swaps in each."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The run that never stopped."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("whole")
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        return train(RECIPE, folder)


def stopped(step: int, folder: Path, *more: str) -> Path:
    """Checkpoints of a run that ends after ``step``."""
    train((*RECIPE, f"trainer.max_steps={step}", *more), folder)
    return folder / "checkpoints"


# The twins stop within a segment, as 7 does.
@pytest.mark.parametrize("step", [7, *(pytest.param(twin, marks=pytest.mark.soak) for twin in (60, 12, 41))])
def test_resumed_is_bitwise_the_run_that_never_stopped(step: int, whole: Trained, tmp_path: Path) -> None:
    """Within a segment, further on, at the end of the first epoch, and in the middle of the second."""
    rest = train((*RECIPE, f"resume={stopped(step, tmp_path / 'first')}"), tmp_path / "rest")
    assert whole.parameters.keys() == rest.parameters.keys()
    for name, value in whole.parameters.items():
        np.testing.assert_array_equal(rest.parameters[name], value, err_msg=name)
    ours, theirs = (r.report["plugins"]["fae"] for r in (rest, whole))
    for name in ("rates", "slice_losses", "swaps"):
        assert ours[name] == theirs[name]
    assert len(set(theirs["rates"])) > 1, "no decision has changed the rate"
    assert 0.1 < theirs["hot_input_share"] < 0.9
    assert theirs["swaps"] > 6
    assert rest.report["quality"] == whole.report["quality"]


@pytest.mark.parametrize(
    ("made_with", "said"),
    [
        ("plugins.fae.schedule=false", r"fae\.schedule=False, not True"),
        ("plugins.fae.rate=60", r"fae\.rate=60\.0, not 30\.0"),
        ("tiers.resident_bytes=10%", r"other hot rows.*tiers\.resident_bytes"),
    ],
)
def test_another_order_is_refused(made_with: str, said: str, tmp_path: Path) -> None:
    """Its position in the epoch would mean other samples, and the loader could wait for ever."""
    kept = stopped(20, tmp_path / "first", made_with)
    with pytest.raises(PluginError, match=said):
        train((*RECIPE, f"resume={kept}"), tmp_path / "rest")


@pytest.mark.parametrize("step", [20, 40])
def test_a_checkpoint_without_the_plugin_is_refused(step: int, tmp_path: Path) -> None:
    """Inside an epoch and at its end, since epochs have another length, too."""
    plain = tuple(override for override in RECIPE if "fae" not in override)
    train((*plain, f"trainer.max_steps={step}", "tiers.policy=lru"), tmp_path / "first")
    with pytest.raises(UserError, match="in the order of the data, this run in that of plugin fae"):
        train((*RECIPE, f"resume={tmp_path / 'first' / 'checkpoints'}"), tmp_path / "rest")
