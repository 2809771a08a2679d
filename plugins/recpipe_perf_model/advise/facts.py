"""What predictions of a recipe know of its data."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from recpipe.access.followed import Followed
from recpipe.config.recipe import Recipe
from recpipe.data.dataset import Dataset
from recpipe.tables.inputs import Inputs
from recpipe_perf_model.facts.collect import collect
from recpipe_perf_model.facts.facts import Facts


def facts_of(
    cfg: Recipe,
    dataset: Dataset,
    inputs: Inputs,
    batches: int,
    steps: int,
    progress: Callable[[int], None] = lambda done: None,
    followed: Sequence[Followed] | None = None,
) -> Facts:
    """Those of a run of so many ``steps`` with the recipe's store and pipeline, from the first ``batches`` of
    the training data, which are read once; ``progress`` and ``followed``: as in ``collect``."""
    size = cfg.data.batch_size
    found = collect(
        inputs,
        lambda: dataset.batches("train", size),
        size,
        batches,
        dataset.size("train"),
        steps,
        cfg.seed,
        progress,
        followed,
    )
    return found.at(store=cfg.tiers.store, prefetch=cfg.tiers.prefetch, emulation=cfg.tiers.emulate)
