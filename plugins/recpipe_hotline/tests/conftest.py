"""Fixtures: real rows and generated ones, prepared once."""

from __future__ import annotations

from pathlib import Path

import pytest
from recpipe_hotline.tests.rig import Random

from recpipe.data.config import SyntheticConfig
from recpipe.data.criteo import SPARSE
from recpipe.data.dataset import Dataset
from recpipe.data.make import open_dataset
from tests.conftest import cli, data_dir  # noqa: F401


@pytest.fixture(scope="session")
def criteo(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:  # noqa: F811
    """Real Criteo rows, with small tables: more collisions, the same skew, a run of a second."""
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


@pytest.fixture(scope="session")
def synthetic() -> Dataset:
    """Generated clicks with skewed ids."""
    return open_dataset(SyntheticConfig(samples=20_000, table_scale=0.02), seed=1)


@pytest.fixture
def random() -> Random:
    """Hand-made batches."""
    return Random(seed=3)
