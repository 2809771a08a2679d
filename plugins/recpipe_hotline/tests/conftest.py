"""Fixtures: real rows and generated ones, prepared once."""

from __future__ import annotations

import pytest
from recpipe_hotline.tests.rig import Random

from recpipe.data.config import SyntheticConfig
from recpipe.data.dataset import Dataset
from recpipe.data.make import open_dataset


@pytest.fixture(scope="session")
def synthetic() -> Dataset:
    """Generated clicks with skewed ids."""
    return open_dataset(SyntheticConfig(samples=20_000, table_scale=0.02), seed=1)


@pytest.fixture
def random() -> Random:
    """Hand-made batches."""
    return Random(seed=3)
