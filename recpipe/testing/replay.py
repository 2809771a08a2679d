"""The run without the plugin to hold one with it against: on the very batches that it trained."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from recpipe.config.compose import compose
from recpipe.config.recipe import Recipe as TypedRecipe
from recpipe.data.given import GivenBatches
from recpipe.data.make import open_dataset
from recpipe.testing.runs import RECIPE, Recipe, Trained, train_recipe
from recpipe.testing.updates import same_samples

_ONCE = (
    "data=given",
    "trainer.max_epochs=1",
    "trainer.max_steps=null",
    "trainer.eval_every=1.0",
    "trainer.checkpoint_every=null",
)
_replays: dict[tuple[int, bool], Trained] = {}


def reference(
    mine: Trained, baseline: Trained, overrides: Sequence[str], first_alone: bool = False
) -> Trained:
    """``baseline``, where it trained the same samples in each step (in the first one, if that is all that
    matters); else a run on the batches of ``mine``."""
    count = 1 if first_alone else None
    if same_samples(mine, baseline, count):
        return baseline
    key = (id(mine), first_alone)
    if key not in _replays:
        _replays[key] = _replay(mine, overrides, count)
    return _replays[key]


def _replay(mine: Trained, overrides: Sequence[str], count: int | None) -> Trained:
    words = (*RECIPE, *overrides)
    cfg = TypedRecipe.of(compose(words))
    schema = open_dataset(cfg.data, cfg.seed).schema
    batches = GivenBatches([step.batch for step in mine.record.steps[:count]], schema=schema)
    kept = [word for word in words if not word.startswith(("data", "tiers", "trainer.max_"))]
    recipe = Recipe((*kept, *_ONCE, f"data.batch_size={cfg.data.batch_size}"))
    with tempfile.TemporaryDirectory(prefix="recpipe-") as folder:
        return train_recipe(recipe, Path(folder), dataset=batches)
