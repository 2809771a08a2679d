"""Encoded rows over two processes: in the holders' stores, and on their way."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.test_torchrun import alone, difference, together

BUDGET = ("tiers.store=host", "tiers.resident_bytes=30%", "model.embedding_dim=8")
RECORD = 8 + 8
"""Bytes: 8 weights, scale and bias; SGD has no state."""


@pytest.mark.slow
def test_a_trainer_and_a_holder_are_bitwise_one_process(tmp_path: Path) -> None:
    """The rows lie on another rank's SSD; they travel as they lie there."""
    recipe = (*BUDGET, "+plugin=quantize", "tiers.policy=lru", "tiers.store=ssd")
    expected = alone(tmp_path / "one", *recipe)
    report = together(tmp_path / "two", 2, *recipe, "topology.embedding_ranks=[1]")
    assert difference(tmp_path / "one", tmp_path / "two") == 0
    assert report["io"]["store"] == "holders (ssd)"
    assert report["io"]["rows_read"] == expected["io"]["rows_read"]
    assert report["io"]["bytes_read"] == report["io"]["rows_read"] * RECORD


@pytest.mark.slow
@pytest.mark.parametrize(
    "owner",
    [
        "bagpipe",
        # Held by other ranks as bagpipe's are.
        pytest.param("het", marks=pytest.mark.soak),
    ],
)
def test_tables_of_a_plugins_own_are_encoded_where_they_are_held(owner: str, tmp_path: Path) -> None:
    recipe = (*BUDGET, f"+plugin=[{owner},quantize]")
    plain = alone(tmp_path / "plain", *BUDGET, "tiers.policy=nocache")
    report = together(tmp_path / "two", 2, *recipe)
    rows = report["assembly"]["tiers"]["rows"]
    assert report["memory"]["cold_bytes"] == (rows + 1) // 2 * RECORD
    assert report["quality"]["logloss"] == pytest.approx(plain["quality"]["logloss"], abs=2e-3)
    assert report["plugins"]["quantize"]["sampled_rows"] > 0
