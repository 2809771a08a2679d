"""Runs of ``PluginSuite`` without a plugin, which all suites compare theirs with: trained once for all of
pytest's processes."""

from __future__ import annotations

import fcntl
import hashlib
import pickle
from pathlib import Path

import pytest

from recpipe.data.dataset import Dataset
from recpipe.testing import apart
from recpipe.testing.runs import SuiteRecipe, Trained

TRAIN = apart.train_apart


def share(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Until ``patch`` ends, what such runs have left is in ``folder``."""

    def trained(
        recipe: SuiteRecipe, own: Path, *more: str, world: int = 1, dataset: Dataset | None = None
    ) -> Trained:
        if recipe.plugin or dataset is not None:
            return TRAIN(recipe, own, *more, world=world, dataset=dataset)
        name = hashlib.sha256(repr((recipe, more, world)).encode()).hexdigest()[:32]
        with (folder / f"baseline-{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
            file = folder / f"baseline-{name}.pickle"
            if not file.exists():
                file.write_bytes(pickle.dumps(TRAIN(recipe, own, *more, world=world)))
            found: Trained = pickle.loads(file.read_bytes())
            return found

    patch.setattr(apart, "train_apart", trained)
