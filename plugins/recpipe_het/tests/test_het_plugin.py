"""HET as users meet it: conformance, knobs, bound 0 against no cache, and resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from recpipe_het.plugin import HET
from recpipe_perf_model.testing import CostsSuite

from recpipe.plugin.errors import PluginError
from recpipe.tasks.plugins import SAMPLE
from recpipe.testing import SMALL, PluginSuite, Trained, train

RUN: tuple[str, ...] = (*SMALL, "trainer.progress=false")
KNOBS: dict[str, Any] = {
    "bound": 1,
    "bounds": None,
    "cache": "lru",
    "updates": "each",
    "measure_staleness": True,
}


class TestHet(PluginSuite, CostsSuite):
    plugin = "het"
    beside: ClassVar = ("quantize",)  # tests/test_pairs.py has the other pairs
    soak: ClassVar = {
        "test_resumes_as_if_it_had_never_stopped": "this file resumes, bitwise",
        "test_leaves_the_process_as_it_was_when_resumed": "hotline's suite has it",
        "test_trains_other_tables_under_adagrad": "hotline's suite, and tests/any_model, have other tables",
        "test_trains_beside_each_other_plugin": "quantize's own tests, under each owner",
        "test_trains_alike_on_several_ranks": "test_het_ranks.py trains on two",
    }

    def test_ships_no_more_than_was_asked(self, trained: Trained) -> None:
        shown = trained.report["plugins"]["het"]
        assert 0 < shown["rows_pulled"] < shown["version_checks"]
        assert shown["rows_pulled"] + shown["cache_hits"] >= shown["version_checks"]
        assert shown["updates_made"] == shown["updates_applied"] == shown["version_checks"]
        assert trained.report["altered"] == ["EXACT_GRADIENT"]


@pytest.mark.parametrize(
    ("knob", "value", "said"),
    [
        ("bound", -1, "bound=-1: give a whole number"),
        ("bound", 1.5, "bound=1.5: give a whole number"),
        ("bound", 2**63, "bound=9223372036854775808: give a whole number"),
        ("bounds", 7, "bounds=7: give bounds by table"),
        ("bounds", {"a": -2}, "bounds.a=-2: give a whole number"),
        ("cache", "fifo", "cache=fifo: choose one of lru, lfu, lfuopt"),
        ("updates", "all", "updates=all: choose one of each, summed"),
        ("measure_staleness", 3, "measure_staleness=3: give true or false"),
    ],
)
def test_knobs_out_of_range(knob: str, value: Any, said: str) -> None:
    with pytest.raises(PluginError, match=f"plugins.het.{said}"):
        HET(**KNOBS | {knob: value})


def test_bounds_name_tables() -> None:
    with pytest.raises(PluginError, match="bounds.nosuch: no such table"):
        HET(**KNOBS | {"bounds": {"nosuch": 2}}).contribute(SAMPLE)


@pytest.mark.soak  # test_het_ranks.py has it over two trainers, and test_het_protocol.py bit by bit
@pytest.mark.parametrize("cache", ["lru", "lfu", "lfuopt"])
def test_bound_zero_is_the_run_without_a_cache(cache: str, tmp_path: Path) -> None:
    mine = train([*RUN, "+plugin=het", "plugins.het.bound=0", f"plugins.het.cache={cache}"], tmp_path / "het")
    plain = train([*RUN, "tiers.policy=nocache"], tmp_path / "plain")
    assert mine.parameters.keys() == plain.parameters.keys()
    for name, values in plain.parameters.items():
        np.testing.assert_allclose(mine.parameters[name], values, atol=1e-5, err_msg=name)


def test_one_trainer_with_a_bound_is_the_run_without_a_cache(tmp_path: Path) -> None:
    """Nothing is stale, and each update makes a step of its own. Steps of summed gradients are another
    algorithm: the negative control."""
    plain = train([*RUN, "tiers.policy=nocache"], tmp_path / "plain")

    def furthest(*words: str) -> float:
        het = train([*RUN, "+plugin=het", "tiers.resident_bytes=30%", *words], tmp_path / f"het{len(words)}")
        shown = het.report["plugins"]["het"]
        assert shown["reads_missing_share"] == 0
        assert shown["verdict"].startswith("one trainer, so no row is ever stale: it saved ")
        return max(
            float(np.abs(het.parameters[name] - values).max()) for name, values in plain.parameters.items()
        )

    assert furthest() < 1e-5
    assert furthest("plugins.het.updates=summed") > 1e-3


def test_traffic_is_the_stores(tmp_path: Path) -> None:
    """Counted as for other caches: blocks of the device, of which a row takes more than its own bytes."""
    shown = train([*RUN, "+plugin=het", "plugins.het.bound=2", "tiers=ssd"], tmp_path / "run").report
    het, io = shown["plugins"]["het"], shown["io"]
    assert (io["rows_written"], io["rows_read"]) == (
        het["rows_pushed"],
        het["rows_pulled"] + het["rows_pushed"],  # a holder reads a row to update it
    )
    assert io["bytes_written"] > het["bytes_pushed"]
    assert io["bytes_read"] > het["bytes_pulled"]


def test_hits_and_cold_starts_are_counted_as_for_other_caches(tmp_path: Path) -> None:
    """With room for all rows, a row misses once, and the cache is never full."""

    def counted(*words: str) -> tuple[list[int], list[int], bool]:
        shown = train([*RUN, *words], tmp_path / str(len(list(tmp_path.iterdir())))).report
        return shown["series"]["lookups"], shown["series"]["hits"], shown["io"]["cold_start"]

    het = ("+plugin=het", "plugins.het.cache=lru")
    roomy = counted(*het, "tiers.resident_bytes=100%")
    assert roomy == counted("tiers.policy=lru", "tiers.resident_bytes=100%")
    assert 0 < sum(roomy[1]) < sum(roomy[0])
    assert not counted(*het)[2], "the cache was full, before the last checkpoint emptied it"


# Checkpoints empty caches of all policies alike.
@pytest.mark.parametrize(
    "cache", ["lru", *(pytest.param(twin, marks=pytest.mark.soak) for twin in ("lfu", "lfuopt"))]
)
def test_resumed_is_bitwise_the_run_that_never_stopped(cache: str, tmp_path: Path) -> None:
    """With checkpoints at the same steps: each one pushes everything and empties the caches."""
    overrides = [
        *RUN,
        "+plugin=het",
        "plugins.het.bound=3",
        f"plugins.het.cache={cache}",
        "tiers.resident_bytes=30%",
        "trainer.checkpoint_every=7",
        # max_steps must not move evaluations, which push.
        "trainer.eval_every=1.0",
    ]
    whole = train(overrides, tmp_path / "whole")
    train([*overrides, "trainer.max_steps=7"], tmp_path / "first")
    rest = train([*overrides, f"resume={tmp_path / 'first' / 'checkpoints'}"], tmp_path / "rest")
    assert whole.parameters.keys() == rest.parameters.keys()
    for name, value in whole.parameters.items():
        np.testing.assert_array_equal(rest.parameters[name], value, err_msg=name)


@pytest.mark.soak  # generated rows are above
def test_bound_zero_on_real_rows(criteo: tuple[str, ...], tmp_path: Path) -> None:
    het = ["+plugin=het", "plugins.het.bound=0", "tiers.resident_bytes=20%"]
    mine = train([*criteo, *het], tmp_path / "het")
    plain = train([*criteo, "tiers.policy=nocache"], tmp_path / "plain")
    for name, values in plain.parameters.items():
        np.testing.assert_allclose(mine.parameters[name], values, atol=1e-5, err_msg=name)
    assert mine.report["plugins"]["het"]["rows_pulled"] < mine.report["plugins"]["het"]["version_checks"]


@pytest.mark.parametrize("bound", [0, pytest.param(100, marks=pytest.mark.soak)])
def test_rows_flushed_for_evaluations_are_counted_apart(bound: int, tmp_path: Path) -> None:
    """Rows shipped are those of training, of which bound 0 ships the same whenever it is evaluated."""
    overrides = [*RUN, "+plugin=het", f"plugins.het.bound={bound}", "tiers.resident_bytes=30%"]
    shown = [
        train([*overrides, f"trainer.eval_every={every}"], tmp_path / str(every)).report["plugins"]["het"]
        for every in (1.0, 3)
    ]
    for figures in shown:
        reasons = ("bound", "eviction", "no_line")
        assert figures["rows_pushed"] == sum(figures[f"pushes_{reason}"] for reason in reasons)
        assert (figures["rows_flushed"] > 0) is (bound > 0)
    if bound == 0:
        assert shown[0] == shown[1]
    else:
        assert shown[0]["rows_flushed"] < shown[1]["rows_flushed"]
