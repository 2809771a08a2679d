"""Runs of several processes, started as a user starts them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.test_torchrun import alone, difference, together

HET = ("+plugin=het", "tiers.resident_bytes=30%", "model.embedding_dim=8")
ROWWISE = ("optim=rowwise_adagrad", "+optim.dense.eps=1e-3", "optim.tables.eps=1e-3")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "optimizer"),
    [
        pytest.param(2, ("optim=sgd",), id="sgd"),
        pytest.param(3, ROWWISE, id="row-wise", marks=pytest.mark.soak),
    ],
)
def test_bound_zero_is_one_process_without_a_cache(
    ranks: int, optimizer: tuple[str, ...], tmp_path: Path
) -> None:
    """Synchronous: every trainer sees all updates of the steps before. The last batch has 1 sample, so that
    trainers have none of it."""
    recipe = ("data.samples=1180", "data.batch_size=41", *optimizer)
    alone(tmp_path / "one", "tiers.policy=nocache", "model.embedding_dim=8", *recipe)
    report = together(tmp_path / "many", ranks, *HET, "plugins.het.bound=0", *recipe)
    assert difference(tmp_path / "one", tmp_path / "many") < 1e-5
    shown = report["plugins"]["het"]
    assert shown["largest_staleness"] == 0
    assert shown["largest_missed_updates"] == shown["mean_missed_updates"] == 0
    assert shown["cache_hits"] > 0
    misses = sum(report["series"]["lookups"]) - sum(report["series"]["hits"])
    assert misses >= shown["rows_pulled"] > shown["stale_pulls"] > 0, (
        "what is pulled for being stale is no hit"
    )
    assert shown["updates_made"] == shown["updates_applied"] > shown["version_checks"]


@pytest.mark.slow
@pytest.mark.parametrize("bound", [pytest.param(0, marks=pytest.mark.soak), 5])
def test_a_trainer_and_a_holder_are_bitwise_one_process(bound: int, tmp_path: Path) -> None:
    """The rows lie on another rank's SSD; one trainer alone makes the updates that it makes alone."""
    recipe = (*HET, "tiers=ssd", "tiers.resident_bytes=30%", f"plugins.het.bound={bound}", *ROWWISE)
    expected = alone(tmp_path / "one", *recipe)
    report = together(tmp_path / "two", 2, *recipe, "topology.embedding_ranks=[1]")
    assert difference(tmp_path / "one", tmp_path / "two") == 0
    assert report["plugins"]["het"] == expected["plugins"]["het"]
    assert report["plugins"]["het"]["updates_applied"] == report["plugins"]["het"]["version_checks"]
    assert (report["ranks"]["trainers"], report["ranks"]["holders"]) == ([0], [1])
    assert report["io"]["store"] == "holders (ssd)"


@pytest.mark.soak  # the protocol bounds it in test_het_protocol.py
@pytest.mark.slow
def test_staleness_of_two_trainers_is_bounded_on_real_rows(criteo: tuple[str, ...], tmp_path: Path) -> None:
    """Cached rows are read stale, never by more than the bound; in the end every update has arrived."""
    bound = 5
    recipe = (*criteo, *HET, f"plugins.het.bound={bound}", "plugins.het.bounds={C3:2}")
    quiet = ("trainer.logger=null", "trainer.checkpoint_every=null")
    shown = together(tmp_path / "run", 2, *quiet, base=recipe)["plugins"]["het"]
    assert 0 < shown["largest_staleness"] <= bound
    assert bound < shown["largest_missed_updates"] <= 2 * bound, "its own and what the holder has not told"
    assert 0 < shown["reads_missing_share"] < 1
    assert shown["largest_stale_pull"] > bound, "what was older has been pulled"
    assert shown["largest_pending"] == bound + 1, "and what waited longer has been pushed"
    assert shown["updates_made"] == shown["updates_applied"] > shown["version_checks"]


@pytest.mark.soak
def test_two_trainers_resume_bitwise(tmp_path: Path) -> None:
    """Against the run that wrote the same checkpoint and went on."""
    recipe = (
        *HET,
        "plugins.het.bound=3",
        "tiers=ssd",
        "tiers.resident_bytes=30%",
        "trainer.checkpoint_every=7",
    )
    together(tmp_path / "whole", 2, *recipe)
    together(tmp_path / "first", 2, *recipe, "trainer.max_steps=7")
    (saved,) = (tmp_path / "first").glob("outputs/*/*/checkpoints/*.ckpt")
    together(tmp_path / "rest", 2, *recipe, f"resume={saved}")
    assert difference(tmp_path / "whole", tmp_path / "rest") == 0
