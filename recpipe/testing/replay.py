"""A run without the plugin on the very batches that the run with it trained, to compare the two."""

from __future__ import annotations

import tempfile
from pathlib import Path

from recpipe.data.given import GivenBatches
from recpipe.testing.apart import train_apart
from recpipe.testing.runs import SuiteRecipe, Trained
from recpipe.testing.updates import same_samples

_ONCE = (
    "data=given",
    "trainer.max_epochs=1",
    "trainer.max_steps=null",
    "trainer.eval_every=1.0",
    "trainer.checkpoint_every=null",
)
_REPLACED = ("data", "trainer.max_", "trainer.eval_every", "trainer.checkpoint_every")
_replays: dict[tuple[int, bool], tuple[Trained, Trained]] = {}
"""Replays by the id of the replayed run. The run is kept, so that no other object gets its id."""


def reference(mine: Trained, baseline: Trained, recipe: SuiteRecipe, first_alone: bool = False) -> Trained:
    """``baseline`` if it trained the same samples in each step (with ``first_alone``, in the first step).
    Otherwise a run of ``recipe``, which has no plugin, on the batches of ``mine``."""
    count = 1 if first_alone else None
    if same_samples(mine, baseline, count):
        return baseline
    key = (id(mine), first_alone)
    if key not in _replays:
        _replays[key] = mine, _replay(mine, recipe, count)
    return _replays[key][1]


def _replay(mine: Trained, recipe: SuiteRecipe, count: int | None) -> Trained:
    dataset, size = recipe.dataset(), int(recipe.composed().data.batch_size)
    held_out = list(dataset.batches("eval", size))
    trained = [step.batch for step in mine.record.steps[:count]]
    batches = GivenBatches(trained, held_out, schema=dataset.schema)
    kept = [word for word in recipe.words if not word.lstrip("+").startswith(_REPLACED)]
    again = SuiteRecipe((*kept, *_ONCE, f"data.batch_size={size}"))
    with tempfile.TemporaryDirectory(prefix="recpipe-") as folder:
        return train_apart(again, Path(folder), dataset=batches)
