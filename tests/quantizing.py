"""A small trained model, whose checkpoint tests quantize."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from recpipe_low_precision.checkpoint import read_manifest, write_manifest

import recpipe

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


def small_checkpoint(folder: Path) -> Path:
    """The checkpoint of a model that is trained in ``folder``."""
    with recpipe.train(None, None, *SMALL, output=folder, quiet=True) as run:
        assert run.checkpoint is not None
        return Path(run.checkpoint)


def as_judged(directory: Path) -> Path:
    """A quantized checkpoint that a test has written, as if it had been judged as well."""
    write_manifest(directory, replace(read_manifest(directory), judged=True))
    return directory
