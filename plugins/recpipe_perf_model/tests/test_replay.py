"""What policies are told to move, beside runs of them on the same data."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from recpipe_perf_model.facts import replay as replaying
from recpipe_perf_model.facts.collect import collect
from recpipe_perf_model.facts.facts import Facts
from recpipe_perf_model.facts.replay import KeptLookups, joined_lookups
from recpipe_perf_model.statement import Moved, Statement
from recpipe_perf_model.tiers.predict import of_policy

from recpipe.config.compose import compose
from recpipe.config.recipe import Recipe
from recpipe.data.make import open_dataset
from recpipe.plugin.load import activate
from recpipe.run import run
from recpipe.setup.ctx import choose_device
from recpipe.setup.placing import Unplaced
from recpipe.tables.tiers.policies import POLICIES
from tests.one_epoch import RECIPE

FEW = "1%"
"""A budget of fewer slots than a batch has rows."""


@pytest.fixture(scope="module")
def facts() -> Facts:
    return collected(RECIPE, sys.maxsize)


def collected(words: list[str], most: int) -> Facts:
    """What is read of at most so many batches."""
    cfg = Recipe.of(compose(words))
    dataset = open_dataset(cfg.data, cfg.seed, None)
    unplaced = Unplaced.of(cfg, dataset, choose_device("cpu"), None)
    batches = min(most, dataset.num_batches("train", cfg.data.batch_size))
    found = collect(cfg, dataset, unplaced.inputs, batches, batches)
    return found.from_empty(batches)


def words(technique: str) -> list[str]:
    if technique in POLICIES:
        return [f"tiers.policy={technique}"]
    # How far it looks ahead otherwise depends on time.
    return [f"+plugin={technique}", *(["plugins.bagpipe.lookahead=8"] if technique == "bagpipe" else [])]


def stated(technique: str, facts: Facts) -> Statement:
    if technique in POLICIES:
        return of_policy(technique, facts)
    plugins = Recipe.of(compose([*RECIPE, *words(technique)])).plugins
    (statement,) = (plugin.costs(facts) for _, plugin in activate(plugins))
    assert statement is not None
    return statement


def all_moved(statement: Statement) -> list[Moved]:
    (phase,) = statement.phases
    return list(phase.moved)


@pytest.mark.parametrize(
    ("technique", "budget"),
    [
        ("lru", FEW),
        # Replayed as lru is.
        *(pytest.param(policy, "10%", marks=pytest.mark.soak) for policy in ("lfu", "bagpipe", "hotline")),
        ("fae", "10%"),
        # Replayed as hotline is.
        pytest.param("slipstream", "10%", marks=pytest.mark.soak),
    ],
)
def test_runs_move_what_was_told(technique: str, budget: str, facts: Facts, tmp_path: Path) -> None:
    report = run(compose([*RECIPE, *words(technique), f"tiers.resident_bytes={budget}"]), tmp_path)
    looked_up, hits = (sum(report["series"][name]) for name in ("lookups", "hits"))
    told = all_moved(stated(technique, facts.at(share=float(budget.rstrip("%")) / 100)))
    missed = facts.steps * sum(moved.missed for moved in told)
    assert missed / looked_up == pytest.approx(1 - hits / looked_up, abs=0.002)
    read = facts.steps * sum(moved.read for moved in told)
    assert read == pytest.approx(report["io"]["rows_read"], rel=0.02)


def test_curves_do_not_know_the_order_within_a_batch(facts: Facts) -> None:
    """With fewer slots than a batch has rows, LRU's curve is off: what the replay is for."""
    (group,) = facts.groups
    forgotten = facts.at(share=0.01, groups=(replace(group, kept=None),))
    by_curve, replayed = (
        sum(moved.missed for moved in each.cached("lru")) / group.lookups
        for each in (forgotten, facts.at(share=0.01))
    )
    assert abs(by_curve - replayed) > 0.02


def test_rows_numbered_anew_move_alike(facts: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third row of a table that is three times as large: what occurs is the same."""
    (group,) = facts.groups
    assert group.kept is not None
    wide = [
        replaying.IndexBags(3 * bags.indices.astype(np.int64), bags.offsets, bags.batch_size)
        for bags in group.kept.batches
    ]
    monkeypatch.setattr(replaying, "MAPPED", 0)
    anew = KeptLookups.of(wide, 3 * group.kept.bases)
    assert anew.rows < group.kept.rows
    slots = group.kept.rows // 10
    for policy in ("lru", "lfu"):
        plain, small = (
            replaying.replay([kept], POLICIES[policy], [slots], True) for kept in (group.kept, anew)
        )
        assert (plain.moved == small.moved).all()
        assert (plain.cold == small.cold).all()
    other = replaying.replay([anew], POLICIES["lru"], [slots], False)
    assert (other.moved != small.moved).any()


def test_a_longer_run_is_as_the_later_half_of_what_was_read(facts: Facts) -> None:
    late = facts.at(share=0.1, late=True)
    (half,) = late.cached("lru")
    (long,) = late.at(steps=100 * facts.steps).cached("lru")
    (whole,) = facts.at(share=0.1).cached("lru")
    (most,) = facts.at(share=0.1, steps=100 * facts.steps).cached("lru")
    assert long.missed == pytest.approx(half.missed)
    assert most.missed == pytest.approx(half.missed, rel=0.01)
    assert whole.missed > 1.02 * half.missed, "the cache began empty"
    (unfilled,) = late.at(share=0.9).cached("lru")
    (filled,) = late.at(share=0.9, steps=100 * facts.steps).cached("lru")
    assert unfilled.evicted == 0 < filled.evicted
    assert filled.missed == unfilled.missed


@pytest.mark.parametrize(
    ("words", "values"),
    [((), 1), (("trainer.ema.decay=0.9",), 10), (("optim=sgd", "optim.tables.momentum=0.9"), 8)],
)
def test_a_record_has_all_that_its_row_has(words: tuple[str, ...], values: int) -> None:
    """Beside 8 weights the optimizer's state, and the average's."""
    found = collected([*RECIPE, "model.embedding_dim=8", *words], 4)
    assert {group.width for group in found.groups} == {8 + values}
    assert {group.record_bytes for group in found.groups} == {4 * (8 + values)}


def test_groups_are_joined_in_one_numbering() -> None:
    one = KeptLookups([replaying.IndexBags(np.array([1, 0]), np.array([0, 1, 2]), 2)], np.array([0, 5]))
    two = KeptLookups([replaying.IndexBags(np.array([3, 3, 2]), np.array([0, 2, 3]), 2)], np.array([0, 4]))
    both = joined_lookups([one, two], 0)
    assert both.rows.tolist() == [1, 0, 8, 8, 7]
    assert both.offsets.tolist() == [0, 1, 2, 4, 5]
