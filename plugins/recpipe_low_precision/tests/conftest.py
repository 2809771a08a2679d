"""Fixtures: a small trained model, whose checkpoint the tests quantize."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from recpipe_low_precision.slices import Slice, between_samples

from recpipe.answers.stored import FloatCheckpoint
from recpipe.answers.trained import open_trained
from tests.quantizing import small_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoint(tmp_path_factory.mktemp("trained"))


@pytest.fixture
def source(checkpoint: Path) -> FloatCheckpoint:
    return open_trained(checkpoint).source()


@pytest.fixture
def slice_of(source: FloatCheckpoint) -> Callable[..., Slice]:
    """A slice of held-out samples ``low`` to ``high``."""
    dataset = open_trained(source.directory).dataset

    def made(low: int, high: int, cache_bytes: int = 1 << 30, **more: object) -> Slice:
        batches = between_samples(dataset.batches("eval", 250), low, high)
        return Slice(source, batches, cache_bytes, **more)  # type: ignore[arg-type]

    return made
