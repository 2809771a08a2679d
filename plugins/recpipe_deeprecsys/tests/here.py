"""What the tests of this folder share."""

from __future__ import annotations

from pathlib import Path

from recpipe.answers.package import Options, package_for
from recpipe.config.compose import compose
from recpipe.run import run


def small_package(folder: Path) -> Path:
    """A small RMC1, trained and packaged in ``folder``."""
    words = [
        *("experiment=rmc1", "data.table_scale=0.0001", "data.samples=300", "data.batch_size=32"),
        *("data.dense=8", "model.bottom=[8,32]", "model.top=[16]", "trainer.max_steps=2"),
        *("trainer.limit_val_batches=1", "trainer.progress=false", "task.page=false"),
    ]
    run(compose(words), folder / "run")
    return package_for(folder / "run", folder / "rmc.recpipe", None, Options(reference=32), screen=False)
