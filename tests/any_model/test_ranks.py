"""What several ranks must do alike, whatever the model does."""

from __future__ import annotations

from pathlib import Path

import pytest

import recpipe
from recpipe.data.dataset import Dataset
from recpipe.data.select import between
from tests.any_model.runs import QUIET, on_two_ranks
from tests.any_model.zoo import OVERRIDES, events, make


def test_a_rank_without_samples_evaluates_along(criteo: Dataset, tmp_path: Path) -> None:
    """Rows are looked up together, also for a model that calls its collections in an order of its own."""
    batches, held_out = events(criteo, 2), events(criteo, 1, first=2)
    held_out.append(between(held_out[0], 0, 1))
    words = ("tiers.policy=lru",)
    told = on_two_ranks(tmp_path, batches, "turned", *words, held_out=held_out)["quality"]
    overrides = (*QUIET, *OVERRIDES["rowwise_adagrad"], *words)
    with recpipe.train(make("turned"), batches, *overrides, held_out=held_out, quiet=True) as run:
        assert told["loss"] == pytest.approx(run.report["quality"]["loss"], rel=1e-4)
