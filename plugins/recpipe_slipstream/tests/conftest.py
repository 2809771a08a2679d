"""Fixtures: generated clicks, and real ones, over small tables, so that many inputs look up hot rows only."""

from __future__ import annotations

from pathlib import Path

import pytest

from recpipe.data.config import SyntheticConfig
from recpipe.data.criteo import SPARSE
from recpipe.data.dataset import Dataset
from recpipe.data.make import open_dataset
from tests.conftest import data_dir  # noqa: F401

TABLES = {"a": 50, "b": 500, "c": 2000}


@pytest.fixture(scope="session")
def clicks() -> Dataset:
    """80 batches of 200 skewed samples."""
    config = SyntheticConfig(samples=20_000, eval_fraction=0.2, table_scale=1, tables=TABLES)
    return open_dataset(config, seed=1)


@pytest.fixture(scope="session")
def criteo(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:  # noqa: F811
    """Real Criteo rows."""
    file = data_dir / "criteo_80k.tsv.gz"
    if not file.is_file():
        pytest.skip(f"no {file}")
    recipe = {
        "name": "criteo",
        "path": str(file),
        "tables": dict.fromkeys(SPARSE, 1000),
        "cache_dir": str(tmp_path_factory.mktemp("cache")),
    }
    return open_dataset(recipe, seed=1)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No popularity profile that an earlier test has saved."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
