"""Two trainers take the same decisions, and train what one process trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.test_torchrun import alone, difference, together

RECIPE = (
    "+plugin=fae",
    "plugins.fae.rate=30",
    "plugins.fae.sample=0.3",
    "plugins.fae.phases=always",
    "plugins.fae.loss_samples=200",
    "data.samples=4000",
    "data.table_scale=1",
    "data.tables={a: 50, b: 500, c: 2000}",
    "tiers=host",
    "tiers.resident_bytes=30%",
    "trainer.max_epochs=2",
)


@pytest.mark.slow
def test_two_trainers_train_what_one_process_trains(tmp_path: Path) -> None:
    expected = alone(tmp_path / "one", *RECIPE)["plugins"]["fae"]
    found = together(tmp_path / "two", 2, *RECIPE)["plugins"]["fae"]
    assert difference(tmp_path / "one", tmp_path / "two") < 1e-5
    assert expected["swaps"] > 6
    assert 0.1 < expected["hot_input_share"] < 0.9
    for name in ("swaps", "rates", "hot_rows", "hot_input_share"):
        assert found[name] == expected[name]
    assert found["slice_losses"] == pytest.approx(expected["slice_losses"], abs=1e-5)
