"""Short runs that leave a checkpoint, and runs stopped where they would read one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from recpipe.checkpoint.table_io import newest
from recpipe.config.compose import compose
from recpipe.run import run

RECIPE = (
    "data.samples=600",
    "data.batch_size=64",
    "data.tables={a: 300, b/c: 80}",
    "model.bottom=[16]",
    "model.top=[16]",
    "trainer.progress=false",
    "trainer.logger=null",
)
STEP = 5


def saved(folder: Path, overrides: Sequence[str]) -> Path:
    """The checkpoint of a run of ``STEP`` steps."""
    steps = (f"trainer.max_steps={STEP}", f"trainer.checkpoint_every={STEP}")
    run(compose([*RECIPE, *steps, *overrides]), folder)
    return newest(folder)


def going_on(overrides: Sequence[str]) -> list[str]:
    """The recipe of a run that trains two steps more."""
    return [*RECIPE, f"trainer.max_steps={STEP + 2}", f"trainer.checkpoint_every={STEP}", *overrides]


class Stopped(Exception):
    """Nothing is to be trained."""


def before_training(folder: Path, overrides: Sequence[str], work: Callable[[Any, Any], None]) -> None:
    """Call ``work(module, checkpoint_io)`` of a run in place of its training."""

    def fit(trainer: Any, module: Any, *_: Any) -> None:
        module.trainer = trainer
        work(module, trainer.strategy.checkpoint_io)
        raise Stopped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recpipe.setup.training.fit", fit)
        with pytest.raises(Stopped):
            run(compose(going_on(overrides)), folder)
