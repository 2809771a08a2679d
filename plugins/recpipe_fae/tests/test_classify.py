"""Classes of samples with several and with no lookups, at the extremes, and the rules for the hot set."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from recpipe_fae.classify import class_batches, classify
from recpipe_fae.prepare import choose
from recpipe_hotline.tests.rig import Fixed, Random

from recpipe.data.select import join
from recpipe.plugin.batch import Batch
from recpipe.plugin.context import Context
from recpipe.plugin.tables import TableOptimizer, TableSet
from tests.placing import context_of


def context(batches: list[Batch]) -> Context:
    data = Fixed(batches)
    tables = TableSet.one_each(data.schema.sparse, 8, TableOptimizer("rowwise_adagrad", 0.1), 1)
    return context_of(tables, 100, data, batch_size=32, batches=lambda first: iter(batches[first:]))


@pytest.mark.parametrize("hot_rows", [0, 20, 400])
def test_bags_of_any_length_are_classified_as_one_by_one(hot_rows: int) -> None:
    random = Random(seed=3)
    batches = [random.batch(size, lengths=(0, 4)) for size in (32, 32, 32, 11)]
    ctx, rows = context(batches), np.arange(hot_rows)
    classes = classify(ctx, rows)
    truth = []
    for batch in batches:
        bags = batch.sparse.to_dict()
        for n in range(batch.size):
            ids = torch.cat((bags["a"].to_dense()[n], bags["b"].to_dense()[n] + 200)).numpy()
            truth.append(bool(np.isin(ids, rows).all()))
    assert classes.samples(True) == sum(truth)
    assert classes.samples(False) == len(truth) - sum(truth)
    dense = torch.cat([batch.dense for batch in batches])
    for hot in (True, False):
        read = list(class_batches(ctx, classes, hot, 0))
        assert len(read) == classes.batches(hot)
        if read:
            assert torch.equal(join(read).dense, dense[torch.tensor(truth) == hot])
            assert all(batch.size == 32 for batch in read[:-1])


def test_the_threshold_is_of_a_tables_own_lookups() -> None:
    counts, bases = np.array([9, 1, 0, 90, 10], np.int32), np.array([0, 3, 5])
    assert choose(counts, bases, None, 3).tolist() == [0, 3, 4]
    assert choose(counts, bases, 0.5, 5).tolist() == [0, 3]
    assert choose(counts, bases, 0.05, 1).tolist() == [3]
    assert choose(counts, bases, None, 5).tolist() == [0, 1, 3, 4], "a row never sampled is not hot"
