"""Schedules of learning rates count FAE's steps: as a run without it does on the same batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from recpipe_fae.tests.test_resume import RECIPE
from recpipe_hotline.tests.rig import difference

import recpipe
from recpipe.config.compose import compose
from recpipe.config.recipe import Recipe
from recpipe.data.make import open_dataset
from recpipe.kit import GivenBatches
from recpipe.pipeline.batch import InFlight
from recpipe.plugin.batch import Batch
from recpipe.training.module import RankingModule

SCHEDULES = (
    "optim.tables.schedule={name: cosine, warmup_steps: 5, decay_steps: 50}",
    "optim.dense.schedule={name: step, step_size: 15, gamma: 0.5}",
    "trainer.max_epochs=1",
    "seed=3",
)
PLAIN = tuple(word for word in RECIPE if "fae" not in word and not word.startswith(("data", "tiers")))


def parameters(run: recpipe.Run) -> dict[str, Any]:
    return {name: value.numpy().copy() for name, value in run.model.state_dict().items()}


def test_schedules_count_steps_as_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Batch] = []
    step = RankingModule.training_step

    def recorded(self: RankingModule, batch: InFlight, batch_idx: int) -> Any:
        seen.append(batch.batch)
        return step(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(RankingModule, "training_step", recorded)
        with recpipe.train(None, None, *RECIPE, *SCHEDULES, quiet=True) as run:
            fae, shown = parameters(run), run.report["plugins"]["fae"]
    assert shown["swaps"] > 3
    schema = open_dataset(Recipe.of(compose([*RECIPE])).data, 3).known_schema()

    def without(*words: str) -> dict[str, Any]:
        with recpipe.train(None, GivenBatches(seen, schema=schema), *PLAIN, *words, quiet=True) as run:
            return parameters(run)

    assert difference(fae, without(*SCHEDULES)) <= 1e-6
    assert difference(fae, without("trainer.max_epochs=1", "seed=3")) > 1e-3, "constant rates"
