"""Fixtures: a small trained model, whose checkpoint the tests quantize."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from recpipe_low_precision.slices import Slice, between_samples

import recpipe
from recpipe.inference.source import FloatCheckpoint
from recpipe.inference.trained import open_trained

SMALL = (
    "data.samples=6000",
    "data.batch_size=250",
    "data.tables={a: 300, b: 90, c: 40, d: 4000}",
    "model.embedding_dim=16",
    "model.bottom=[16]",
    "model.top=[16]",
    "tiers.policy=resident",
    "trainer.eval_every=1.0",
    "trainer.logger=null",
    "trainer.backend=plain",
)
"""1,200 samples are held out."""


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    with recpipe.train(None, None, *SMALL, output=folder, quiet=True) as run:
        assert run.checkpoint is not None
        return Path(run.checkpoint)


@pytest.fixture
def source(checkpoint: Path) -> FloatCheckpoint:
    return FloatCheckpoint.of(open_trained(checkpoint))


@pytest.fixture
def slice_of(source: FloatCheckpoint) -> Callable[..., Slice]:
    """A slice of held-out samples ``low`` to ``high``."""
    dataset = open_trained(source.directory).dataset

    def made(low: int, high: int, cache_bytes: int = 1 << 30, **more: object) -> Slice:
        batches = between_samples(dataset.batches("eval", 250), low, high)
        return Slice(source, batches, cache_bytes, **more)  # type: ignore[arg-type]

    return made
