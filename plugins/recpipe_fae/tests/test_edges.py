"""Epochs with one class alone, bags of any length: every sample is trained once, and exactly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from recpipe_fae.tests.rig import SIZE, pair
from recpipe_hotline.tests.rig import Fixed, Random, difference

from recpipe.data.dataset import Dataset
from recpipe.plugin.batch import Batch


def samples(batches: list[Batch]) -> list[tuple[float, ...]]:
    """Dense features, which no two samples share, in order."""
    return [tuple(row) for batch in batches for row in batch.dense.tolist()]


def bags(least: int, most: int) -> Dataset:
    """Four full batches and a short one; 400 rows in all."""
    random = Random(seed=5)
    return Fixed([random.batch(size, lengths=(least, most)) for size in (SIZE, SIZE, SIZE, SIZE, 77)])


@pytest.mark.parametrize(
    ("share", "lengths", "hot_share"),
    [
        (0.0, (1, 3), 0.0),  # one hot row, and every sample looks up two tables
        (0.0, (0, 1), None),  # samples without lookups are hot
        (0.2, (0, 4), None),
        (1.0, (1, 1), 1.0),
        (1.0, (0, 4), 1.0),
    ],
    ids=["no hot sample", "empty bags and one row", "multi-hot", "all hot", "all hot multi-hot"],
)
@pytest.mark.parametrize("schedule", [True, False])
def test_each_sample_is_trained_once_and_exactly(
    share: float, lengths: tuple[int, int], hot_share: float | None, schedule: bool, tmp_path: Path
) -> None:
    data = bags(*lengths)
    fae, one = pair(data, "rowwise_adagrad", tmp_path, share, sample=1.0, schedule=schedule, rate=30)
    source = list(data.batches("train", SIZE))
    assert sorted(samples(fae.seen)) == sorted(samples(source))
    # A bag of hot and cold rows is the sum of two sums, which rounds in another order.
    mixed = lengths[1] > 1 and share < 1
    assert difference(fae.parameters(), one.parameters()) <= (1e-6 if mixed else 0)
    classes = fae.order.prepared.classes
    found = classes.samples(True) / len(samples(source))
    assert found == hot_share if hot_share is not None else 0 < found < 1
    if found in (0, 1):
        assert samples(fae.seen) == samples(source), "one class keeps the data's order"
        assert fae.order.scheduler.swaps == 0
    assert [batch.size for batch in fae.seen].count(SIZE) >= len(fae.seen) - 2, "a short batch for each class"


def test_an_epoch_of_one_batch(tmp_path: Path) -> None:
    """Shorter than any segment, and its rows enter with the batch itself."""
    data = Fixed([Random(seed=6).batch(50)])
    fae, one = pair(data, "sgd", tmp_path, 1.0, sample=0.05, rate=1)
    assert len(fae.seen) == 1
    assert difference(fae.parameters(), one.parameters()) == 0
    assert np.array_equal(fae.tiers.resident_rows(), fae.order.prepared.hot_rows)
