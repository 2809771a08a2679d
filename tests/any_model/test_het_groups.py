"""HET over tables of several dimensions and collections, of which each group is cached apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import recpipe
from recpipe.data.dataset import Dataset
from tests.any_model.runs import QUIET, furthest_left, left_by, on_two_ranks, train
from tests.any_model.zoo import FLAT, OVERRIDES, ROWS, Events, by_hand, events, furthest, make

HET = ("+plugin=het", "plugins.het.bound=0")
BOUND = 3


@pytest.fixture(scope="module")
def batches(criteo: Dataset) -> list[Events]:
    return events(criteo, 6)


def test_bound_zero_is_the_loop_by_hand_under_sgd(batches) -> None:
    assert (
        furthest(train(make("two_tower"), batches, "sgd", *HET), by_hand(make("two_tower"), batches, "sgd"))
        < 1e-6
    )


@pytest.mark.parametrize("table", ["goods", "t_c0"])
def test_a_bound_of_one_groups_table_alone_is_noticed(batches, table) -> None:
    """Gradients that wait are summed up, which row-wise Adagrad does not take for the single ones."""
    loose = (f"plugins.het.bounds={{{table}: 50}}", "plugins.het.updates=summed")
    mine = train(make("two_tower"), batches, "rowwise_adagrad", *HET, *loose)
    theirs = by_hand(make("two_tower"), batches, "rowwise_adagrad")
    (own,) = (name for name in theirs.parameters if f".{table}." in name)
    assert float((mine.parameters[own] - theirs.parameters[own]).abs().max()) > 1e-3


def distinct(batches: list[Events]) -> tuple[int, int, int]:
    """Of the two-tower: all lookups, and distinct rows of each batch in the user's and the items' tables."""
    lookups = user = items = 0
    for batch in batches:
        flat = batch.sparse_features.values().view(len(FLAT), -1)[:4].numpy()
        lookups += batch.lists.values().numel() + flat.size
        user += len(np.unique(batch.lists.values().numpy() % ROWS))
        items += sum(len(np.unique(column)) for column in flat)
    return lookups, user, items


def test_figures_are_those_of_all_groups(batches) -> None:
    words = (*QUIET, *OVERRIDES["rowwise_adagrad"], *HET, "plugins.het.cache=lru")
    with recpipe.train(make("two_tower"), batches, *words, quiet=True) as run:
        shown = run.report["plugins"]["het"]
    lookups, user, items = distinct(batches)
    assert (shown["lookups"], shown["version_checks"]) == (lookups, user + items)
    assert shown["updates_made"] == shown["updates_applied"] == user + items
    # Bound 0 pushes every update, in a push of its own.
    assert shown["bytes_pushed"] == 4 * (8 * user + 4 * items)
    assert 0 < shown["rows_pulled"] < user + items
    assert 4 * (4 + 1) * shown["rows_pulled"] < shown["bytes_pulled"] < 4 * (8 + 1) * shown["rows_pulled"]
    assert shown["largest_pending"] == 1


def test_stopping_and_resuming_is_bitwise(batches, tmp_path: Path) -> None:
    """Against the run that wrote the same checkpoints: each of them empties the caches."""
    words = (*QUIET, *OVERRIDES["rowwise_adagrad"], "+plugin=het", f"plugins.het.bound={BOUND}")
    words += ("trainer.max_epochs=1", "trainer.checkpoint_every=2")

    def trained(folder: str, *more: str):
        where = f"trainer.checkpoint_dir={tmp_path / folder}"
        with recpipe.train(make("two_tower"), batches, *words, where, *more, quiet=True) as run:
            return left_by(run.model)

    whole = trained("whole")
    first = min((tmp_path / "whole").glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    assert furthest(trained("rest", f"resume='{first}'"), whole) == 0


def test_staleness_of_two_trainers_is_bounded_in_every_group(batches, tmp_path: Path) -> None:
    """And it is not what one process trains, as it is with bound 0."""
    words = ("+plugin=het", f"plugins.het.bound={BOUND}")
    shown = on_two_ranks(tmp_path, batches * 2, "two_tower", *words)["plugins"]["het"]
    assert 0 < shown["largest_staleness"] <= BOUND
    assert shown["largest_pending"] == BOUND + 1
    assert shown["updates_made"] == shown["updates_applied"] > shown["version_checks"]
    assert furthest_left(tmp_path, by_hand(make("two_tower"), batches * 2, "rowwise_adagrad")) > 1e-3
