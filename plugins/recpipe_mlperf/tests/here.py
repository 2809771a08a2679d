"""Runs of ``task=time_to_quality`` in this process, which start in a tenth of the time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console

from recpipe.config.compose import compose
from recpipe.run import run

SMALL = (
    *("data.samples=6000", "data.batch_size=64", "data.tables={a: 60, b: 20}", "model.embedding_dim=4"),
    *("model.bottom=[8]", "model.top=[8]", "trainer.progress=false", "trainer.backend=plain"),
    *("optim.tables.lr=0.1", "optim.dense.lr=0.1", "trainer.logger=null"),
)
"""A recipe whose step takes a millisecond, and whose AUC goes from 0.5 to 0.7 in an epoch of 75 steps."""
QUIET = Console(quiet=True)


def launched(arguments: list[str], directory: Path) -> dict[str, Any]:
    """What ``run_apart`` does in a process of its own."""
    composed = compose(arguments)
    (directory / ".hydra").mkdir(parents=True)
    OmegaConf.save(composed, directory / ".hydra" / "config.yaml")
    return run(composed, directory)
