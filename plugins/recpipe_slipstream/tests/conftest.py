"""Fixtures: generated clicks, and real ones, over small tables, so that many inputs look up hot rows only."""

from __future__ import annotations

from pathlib import Path

import pytest

from recpipe.data.config import SyntheticConfig
from recpipe.data.dataset import Dataset
from recpipe.data.make import open_dataset

TABLES = {"a": 50, "b": 500, "c": 2000}


@pytest.fixture(scope="session")
def clicks() -> Dataset:
    """80 batches of 200 skewed samples."""
    config = SyntheticConfig(samples=20_000, eval_fraction=0.2, table_scale=1, tables=TABLES)
    return open_dataset(config, seed=1)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No popularity profile that an earlier test has saved."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
