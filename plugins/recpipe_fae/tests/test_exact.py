"""FAE equals one resident table fed the same batches, and a hot phase moves no cold row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recpipe_fae.schedule import plan
from recpipe_fae.tests.rig import Run, pair
from recpipe_hotline.tests.rig import difference

from recpipe.data.dataset import Dataset
from recpipe.tables.rows import table_bags
from recpipe.tables.tiers.layout import Layout


@pytest.mark.parametrize(
    ("source", "optimizer"),
    [
        ("synthetic", "adagrad"),
        # By the same comparison; training does not see where its rows are from.
        pytest.param("synthetic", "sgd", marks=pytest.mark.soak),
        pytest.param("criteo", "rowwise_adagrad", marks=pytest.mark.soak),
        pytest.param("synthetic", "rowwise_adagrad", marks=pytest.mark.soak),
        pytest.param("criteo", "sgd", marks=pytest.mark.soak),
        pytest.param("criteo", "adagrad", marks=pytest.mark.soak),
    ],
)
def test_equals_one_table_fed_the_same_order_bitwise(
    source: str, optimizer: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    fae, one = pair(request.getfixturevalue(source), optimizer, tmp_path)
    assert sum(fae.cold_rows) > 0
    assert difference(fae.parameters(), one.parameters()) == 0


def test_rows_that_move_without_their_state_are_noticed(
    synthetic: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Layout.slab_records

    def stateless(self: Layout) -> Any:
        records = read(self).clone()
        records[:, self.tables.dim :] = 0
        return records

    monkeypatch.setattr(Layout, "slab_records", stateless)
    fae, one = pair(synthetic, "rowwise_adagrad", tmp_path)
    assert difference(fae.parameters(), one.parameters()) > 0


def test_partition_order_and_no_cold_row_in_a_hot_phase(synthetic: Dataset, tmp_path: Path) -> None:
    run = Run(synthetic, "sgd", 0.6, tmp_path).epoch()
    classes, scheduler = run.order.prepared.classes, run.order.scheduler
    hot, cold = classes.batches(True), classes.batches(False)
    assert hot > 1, "nothing is tested without hot batches"
    assert cold > 1
    resident = run.order.prepared.hot_rows
    is_hot = [
        bool(np.isin(table_bags(run.tables, batch.sparse).indices, resident).all()) for batch in run.seen
    ]
    assert sum(is_hot) == hot
    assert all(rows == 0 for rows, h in zip(run.cold_rows, is_hot, strict=True) if h)
    labels = np.concatenate([b.dense.numpy() for b in run.seen])
    source = np.concatenate([b.dense.numpy() for b in run.ctx.batches(0)])
    assert sorted(map(tuple, labels.tolist())) == sorted(map(tuple, source.tolist()))
    assert len(scheduler.losses) >= 4


@pytest.mark.parametrize(("rate", "schedule"), [(30, True), (100, False)])
def test_a_hot_phase_leaves_the_cold_store_alone(
    rate: float, schedule: bool, synthetic: Dataset, tmp_path: Path
) -> None:
    """By the store's own counters, from the update of its first batch to that of its last."""
    run = Run(synthetic, "sgd", 0.6, tmp_path, rate=rate, schedule=schedule).epoch()
    scheduler = run.order.scheduler
    sizes = run.order.prepared.sizes
    segments, complete = plan(scheduler.history, sizes) if schedule else plan([], sizes, rate)
    assert complete
    # Without a decision to wait for, the loader fetches the next cold batch while the last hot one trains.
    ahead, start, checked = 0 if schedule else 1, 0, 0
    for segment in segments:
        end = start + segment.stop - segment.start
        io = run.io[start : end - (ahead if end < len(run.io) else 0)]
        moved = {(one.rows_read, one.rows_written) for one in io}
        if segment.hot:
            assert len(moved) <= 1
            checked += len(io) > 1
        else:
            assert len(moved) == len(io), "each cold batch moves rows"
        start = end
    assert start == len(run.io)
    assert checked


def test_reading_from_the_middle_is_reading_from_the_start(synthetic: Dataset, tmp_path: Path) -> None:
    run = Run(synthetic, "sgd", 0.6, tmp_path)
    order = run.order
    order.scheduler.rates = [30.0] * len(plan([], order.prepared.sizes, 30)[0])
    whole = list(order.batches(0))
    assert len(whole) == len(order)
    for first in (1, len(whole) // 2, len(whole) - 1):
        part = list(order.batches(first))
        assert len(part) == len(whole) - first
        for one, two in zip(part, whole[first:], strict=True):
            assert torch.equal(one.dense, two.dense)
            assert torch.equal(one.sparse.values(), two.sparse.values())


def test_the_same_seed_gives_the_same_hot_set_and_a_larger_one_serves_more(
    synthetic: Dataset, tmp_path: Path
) -> None:
    runs = [Run(synthetic, "sgd", share, tmp_path / str(n)) for n, share in enumerate((0.3, 0.3, 0.6, 0.0))]
    rows = [run.order.prepared.hot_rows for run in runs]
    hot = [run.order.prepared.classes.samples(True) for run in runs]
    assert np.array_equal(rows[0], rows[1])
    assert len(rows[3]) == 1, "a budget of one row"
    assert hot[3] <= hot[0] <= hot[2]
