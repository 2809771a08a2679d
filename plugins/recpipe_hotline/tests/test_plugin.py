"""The plugin as users meet it: conformance, knobs, report, composition."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from recpipe_hotline.plugin import Hotline, PopularFirst, figures
from recpipe_hotline.tests.rig import ROOM, Setting, default_knobs, train
from recpipe_hotline.tests.test_policy import batches, make, see
from recpipe_perf_model.testing import CostsSuite

from recpipe.data.dataset import Dataset
from recpipe.plugin.context import Io, RunFigures
from recpipe.plugin.errors import PluginError
from recpipe.testing import SMALL, PluginSuite
from recpipe.testing import train as run

FIGURES = {
    "verdict",
    "popular_sample_share",
    "popular_lookup_share",
    "split_batch_share",
    "rows_not_moved",
    "cold_rows_read",
    "cold_bytes_read",
    "fetch_hidden_seconds",
    "fetch_waited_seconds",
    "learnings",
    "replaced_rows",
    "popular_seconds",
    "non_popular_seconds",
    "speedup_bound",
}
OF_CACHE = {
    "popular_lookup_share",
    "rows_not_moved",
    "cold_rows_read",
    "cold_bytes_read",
    "learnings",
    "replaced_rows",
}


class TestHotline(PluginSuite, CostsSuite):
    plugin = "hotline"
    beside: ClassVar = ("quantize",)  # tests/test_pairs.py has the other pairs
    soak: ClassVar = {
        "test_trains_alike_on_several_ranks": "tests/distributed/test_torchrun.py trains on three",
        "test_trains_beside_each_other_plugin": "quantize's own tests, under each owner",
    }

    def test_really_trains_micro_batches(self, trained: Any) -> None:
        """Else the other tests would compare a run with itself."""
        shown = trained.report["plugins"]["hotline"]
        assert set(shown) == FIGURES
        assert shown["split_batch_share"] > 0.3
        assert shown["learnings"] > 1
        assert 0 < shown["popular_sample_share"] < 1
        assert trained.report["io"]["rows_read"] == shown["cold_rows_read"] > 0
        assert trained.report["altered"] == []


@pytest.mark.parametrize(
    ("knob", "value", "remedy"),
    [
        ("learn_batches", 0, "must be at least 1"),
        ("relearn_every", 0, "must be at least 1"),
        ("decay", 0, "must be at least 1"),
        ("min_micro_batch", -1, "must be at least 0"),
        ("growth", 0.5, "must be at least 1"),
        ("sample", 0.0, "a share of batches above 0, up to 1"),
        ("sample", 1.5, "a share of batches above 0, up to 1"),
        ("sample", float("nan"), "a share of batches above 0, up to 1"),
        ("growth", float("nan"), "must be at least 1"),
    ],
)
def test_knobs_out_of_range(knob: str, value: float, remedy: str) -> None:
    with pytest.raises(PluginError, match=f"plugins.hotline.{knob}={value}: .*{remedy}"):
        Hotline(**default_knobs() | {knob: value})


def run_figures(**io: float) -> RunFigures:
    return RunFigures(
        steps=1,
        samples=8,
        lookups=80,
        io=Io(store="host", **io),  # type: ignore[arg-type]
        before_cold_seconds=2.0,
        after_cold_seconds=5.0,
        fills=frozenset({"splitter"}),
    )


def test_figures_add_up() -> None:
    policy = make()
    for rows in batches(10):
        see(policy, rows)
    shown = figures([policy], PopularFirst(1), run_figures(fetch_seconds=3.0, wait_seconds=1.0, rows_read=7))
    assert shown["fetch_hidden_seconds"] == 2.0
    assert shown["fetch_waited_seconds"] == 1.0
    assert shown["cold_rows_read"] == 7
    assert shown["speedup_bound"] == pytest.approx((3 + 2 + 5) / (3 + 5))
    assert shown["popular_lookup_share"] == policy.hits / policy.lookups
    assert shown["popular_sample_share"] == 0


def test_nothing_is_hidden_when_training_waits_longer_than_fetches_take() -> None:
    shown = figures([make()], PopularFirst(1), run_figures(fetch_seconds=1.0, wait_seconds=1.5))
    assert shown["fetch_hidden_seconds"] == 0.0


def test_figures_of_a_run(synthetic: Dataset, tmp_path: Path) -> None:
    rig, _ = train(synthetic, Setting(), tmp_path, 40)
    shown = rig.figures()
    assert set(shown) == FIGURES
    fetch, wait = rig.tiers.times.fetch, rig.tiers.times.wait
    assert shown["fetch_hidden_seconds"] == pytest.approx(max(0.0, fetch - wait))
    assert shown["learnings"] == rig.policy.learnings > 1
    popular = sum(bounds[0] for bounds in rig.micro if len(bounds) > 1)
    samples = sum(bounds[-1] for bounds in rig.micro)
    # The batch that was staged ahead is counted, too.
    assert shown["popular_sample_share"] == pytest.approx(popular / samples, abs=0.05)
    assert shown["split_batch_share"] == pytest.approx(rig.split_batches / len(rig.micro), abs=0.05)


def test_another_splitters_work_is_not_reported_as_its_own(synthetic: Dataset, tmp_path: Path) -> None:
    rig, _ = train(synthetic, Setting(), tmp_path, 40)
    (reporter,) = rig.assembly.reporters
    own = reporter.part(replace(run_figures(), fills=frozenset()))
    assert own["verdict"] == "batches were not cut by Hotline: another splitter was preferred"
    assert set(own) == OF_CACHE | {"verdict"}
    assert {name: own[name] for name in ("learnings", "replaced_rows")} == {
        "learnings": rig.policy.learnings,
        "replaced_rows": rig.policy.replaced_rows,
    }


def test_the_readme_explains_every_figure() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    for figure in FIGURES:
        assert f"`{figure}`" in readme, figure


@pytest.mark.parametrize("stop", [pytest.param(7, marks=pytest.mark.soak), 23])
@pytest.mark.soak  # the suite's own stop is by default
def test_resumed_is_bitwise_the_run_that_never_stopped(stop: int, tmp_path: Path) -> None:
    """Before the first learning, and between later ones."""
    overrides = ["+plugin=hotline", *SMALL, *ROOM, "trainer.progress=false"]
    whole = run(overrides, tmp_path / "whole")
    kept = tmp_path / "first" / "checkpoints"
    run([*overrides, f"trainer.max_steps={stop}", f"trainer.checkpoint_every={stop}"], tmp_path / "first")
    rest = run([*overrides, f"resume={kept}"], tmp_path / "rest")
    assert whole.parameters.keys() == rest.parameters.keys()
    for name, value in whole.parameters.items():
        np.testing.assert_array_equal(rest.parameters[name], value, err_msg=name)
    shown = [r.report["plugins"]["hotline"] for r in (whole, rest)]
    assert shown[0]["learnings"] == shown[1]["learnings"] > 1
    assert shown[0]["popular_lookup_share"] == shown[1]["popular_lookup_share"]
    assert shown[0]["replaced_rows"] == shown[1]["replaced_rows"]


def test_a_checkpoint_can_be_continued_with_another_budget(tmp_path: Path) -> None:
    """Rows are placed anew, and the result is that of the run without the plugin."""
    overrides = [*SMALL, *ROOM, "trainer.progress=false"]
    whole = run(overrides, tmp_path / "whole")
    first = [*overrides, "+plugin=hotline", "trainer.max_steps=20", "trainer.checkpoint_every=20"]
    run(first, tmp_path / "first")
    again = [
        *overrides,
        "+plugin=hotline",
        "tiers.resident_bytes=60%",
        f"resume={tmp_path / 'first' / 'checkpoints'}",
    ]
    rest = run(again, tmp_path / "rest")
    for name, value in whole.parameters.items():
        np.testing.assert_allclose(rest.parameters[name], value, rtol=0, atol=1e-5, err_msg=name)
