"""When mini-batches are separated: the estimate, the trial, the sentence about it, and the plain cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recpipe_fae.estimate import Estimate, estimate, expected, sentence
from recpipe_fae.prepare import HotOnUse
from recpipe_fae.tests.rig import Run
from recpipe_fae.tests.test_classify import context
from recpipe_fae.tests.test_resume import RECIPE
from recpipe_hotline.tests.rig import Random, difference

from recpipe.data.dataset import Dataset
from recpipe.plugin.policy import RowSpace
from recpipe.testing import train

HALF = Estimate(0.5, 0.9, 0.5)


def test_the_estimate_is_what_a_full_pass_finds() -> None:
    random = Random(seed=4)
    batches = [random.batch(32) for _ in range(12)]
    ctx = replace(context(batches), epoch_samples=12 * 32)
    hot_rows = np.arange(0, 400, 3)
    cold: list[np.ndarray[Any, Any]] = []
    mixed = samples = 0
    for batch in batches:
        bags = ctx.lookups(batch)
        rows = bags.rows.reshape(2, -1).T  # two tables, one id in each
        missing = ~np.isin(rows, hot_rows)
        mixed += len(np.unique(rows[missing]))
        cold += [row[m] for row, m in zip(rows, missing, strict=True) if m.any()]
        samples += len(rows)
    whole = len(cold) // 32 * 32
    alone = sum(len(np.unique(np.concatenate(cold[n : n + 32]))) for n in range(0, whole, 32))
    found = estimate(ctx, hot_rows)
    assert found.hot_input_share == 1 - len(cold) / samples
    assert found.fetch_share == pytest.approx(alone * len(cold) / whole / mixed)
    assert estimate(ctx, np.arange(400)) == Estimate(1.0, 1.0, 1.0)
    assert not estimate(ctx, np.arange(400)).can_pay


def test_what_mixed_batches_would_take() -> None:
    hidden = expected(([0.02] * 9, [0.02] * 9, []), HALF)
    assert hidden is not None
    assert hidden.gain == pytest.approx(1)
    bound = expected(([1.0] * 9 + [0.08] * 9, [0.02] * 9, []), HALF)
    assert bound is not None
    assert (bound.mixed, bound.separate) == pytest.approx((0.08, 0.05)), "the first steps do not count"
    no_gain = expected(([0.08] * 9, [0.02] * 9, []), replace(HALF, fetch_share=1.0))
    assert no_gain is not None
    assert no_gain.gain == pytest.approx(0.8)
    assert expected(([0.02], [], []), HALF) is None


def test_the_sentence() -> None:
    steps = ([0.08] * 9, [0.02] * 9, [0.07] * 9)
    assert "50.0% of the inputs are hot" in sentence("never", False, False, ((), (), ()), HALF)
    refused = sentence("auto", False, False, ((), (), ()), replace(HALF, fetch_share=0.98))
    assert "98% of the rows" in refused
    assert "gain 2% at most" in refused
    assert sentence("always", True, False, steps, HALF).startswith("separating paid: a cold step took 80.0")
    assert "and took 70.0; 50.0%" in sentence("auto", True, True, steps, HALF)
    assert "no cold row" in sentence("auto", False, False, ((), (), ()), Estimate(1.0, 1.0, 1.0))


def test_rows_of_the_set_enter_when_they_are_used() -> None:
    space = RowSpace(np.array([0, 10]), 3)
    policy = HotOnUse(space, np.array([2, 5, 7]))
    none = np.empty(0, np.int32)
    for misses, rows in (([1, 5, 9], [5]), ([2, 3], [2]), ([0, 7], [7]), ([4], [])):
        placed = policy.admit(none, np.array(misses), np.array(misses))
        assert placed.rows.tolist() == rows
        space.residents.put(placed.slots, placed.rows)
    assert sorted(space.residents.rows.tolist()) == [2, 5, 7]
    policy.load_state_dict({"target": np.array([5, 8])})
    placed = policy.admit(space.residents.slot_of(np.array([2])), np.array([8]), np.array([2, 8]))
    assert placed.rows.tolist() == [8]
    assert space.residents.row_of_slot[placed.slots].tolist() == [7], "not the row that the batch uses"


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least gain is worth a trial."""
    monkeypatch.setattr("recpipe_fae.estimate.WORTH", 1.001)


@pytest.mark.usefixtures("tried")
@pytest.mark.parametrize("skip", [0, 3])
def test_after_a_trial_each_sample_is_trained_once(synthetic: Dataset, tmp_path: Path, skip: int) -> None:
    """Whatever has been trained in phases; and reading may begin at any batch of the rest."""
    run = Run(synthetic, "sgd", 0.6, tmp_path, phases="auto", rate=50, schedule=False)
    order, scheduler = run.order, run.order.scheduler
    assert order.prepared.separates, "there is no trial"
    segments, _ = scheduler.plan(order.prepared.sizes)
    trained = len(segments[0]) + len(segments[1])
    scheduler.trained = trained
    scheduler.judge(separate=False)
    whole = list(order.batches(0))
    assert len(whole) == len(order)
    source = np.concatenate([b.dense.numpy() for b in run.ctx.batches(0)])
    seen = np.concatenate([b.dense.numpy() for b in whole])
    assert sorted(map(tuple, seen.tolist())) == sorted(map(tuple, source.tolist()))
    place = {tuple(row): number for number, row in enumerate(source.tolist())}
    late = [place[tuple(row)] for batch in whole[trained:] for row in batch.dense.tolist()]
    assert late == sorted(late), "the rest is in the data's order"
    part = list(order.batches(trained + skip))
    assert [b.labels.tolist() for b in part] == [b.labels.tolist() for b in whole[trained + skip :]]


def test_never_is_the_run_without_it(tmp_path: Path) -> None:
    plain = tuple(word for word in RECIPE if "fae" not in word and "resident" not in word)
    without = train(plain, tmp_path / "without")
    never = train((*RECIPE, "plugins.fae.phases=never"), tmp_path / "never")
    assert never.report["altered"] == []
    assert never.report["plugins"]["fae"]["hot_rows"] > 0
    assert difference(never.parameters, without.parameters) <= 1e-6


def test_auto_takes_the_datas_order_where_nothing_can_be_gained(tmp_path: Path) -> None:
    """All rows fit here; samples are not even classified."""
    words = (*RECIPE, "plugins.fae.phases=auto", "tiers.resident_bytes=100%", "plugins.fae.sample=1.0")
    found = train(words, tmp_path).report
    shown = found["plugins"]["fae"]
    assert shown["hot_input_share"] == 1
    assert shown["classification_seconds"] == shown["phases"] == 0
    assert shown["verdict"].startswith("mini-batches were not separated, and samples not classified: 100.0%")
    assert found["data"]["train_samples"] == 8000
    assert (found["altered"], found["altered_in_run"], shown["altered"]) == (["SAMPLE_ORDER"], [], "nothing")


@pytest.mark.usefixtures("tried")
def test_a_trial_by_time(tmp_path: Path) -> None:
    """Either way it goes, every sample is trained once in both epochs, which core checks."""
    words = (*RECIPE, "plugins.fae.phases=auto", "plugins.fae.sample=1.0")
    shown = train(words, tmp_path).report["plugins"]["fae"]
    assert shown["verdict"].startswith("separating ")
