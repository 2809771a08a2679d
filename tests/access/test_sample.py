"""The sample of looked-up rows."""

from __future__ import annotations

import tracemalloc

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.access.sample import BATCHES, AccessSample
from recpipe.common.timing import Spans
from recpipe.plugin.tables import Table, TableOptimizer, TableSet
from recpipe.tables.groups import ModelTables

TABLES = ModelTables.single(
    TableSet((Table("a", 50, ("f", "g")), Table("b", 9, ("h",))), 4, TableOptimizer("sgd", 0.1), 0)
)


def batch(rng: np.random.Generator) -> KeyedJaggedTensor:
    lengths = rng.integers(0, 4, 3 * 8)
    rows = np.repeat([50, 50, 9], lengths.reshape(3, 8).sum(1))
    ids = torch.from_numpy((rng.random(len(rows)) ** 2 * rows).astype(np.int64))
    return KeyedJaggedTensor(["f", "g", "h"], ids, lengths=torch.from_numpy(lengths))


def counted(batches: list[KeyedJaggedTensor]) -> dict[str, list[int]]:
    ids = {key: torch.cat([b[key].values() for b in batches]) for key in ("f", "g", "h")}
    of_table = {"a": torch.cat((ids["f"], ids["g"])), "b": ids["h"]}
    times = {name: torch.bincount(part) for name, part in of_table.items()}
    return {name: sorted(part[part > 0].tolist()) for name, part in times.items()}


def test_a_small_run_is_counted_whole() -> None:
    rng = np.random.default_rng(0)
    batches = [batch(rng) for _ in range(5)]
    sample = AccessSample(TABLES)
    for one in batches:
        sample.add((one,))
    assert {name: sorted(found.tolist()) for name, found in sample.counts().items()} == counted(batches)
    assert (sample.batches, sample.lookups) == (5, sum(one.values().numel() for one in batches))


def test_a_long_run_is_sampled_evenly() -> None:
    rng = np.random.default_rng(0)
    batches = [batch(rng) for _ in range(100)]
    sample = AccessSample(TABLES, most=400)
    for one in batches:
        sample.add((one,))
    assert sample.stride > 1
    assert sample.lookups <= 400
    kept = batches[:: sample.stride]
    assert sample.batches == len(kept)
    assert {name: sorted(found.tolist()) for name, found in sample.counts().items()} == counted(kept)
    assert AccessSample(TABLES).counts() == {}


def test_many_small_batches_do_not_add_up() -> None:
    """Each takes more beside its few lookups than these."""
    rng = np.random.default_rng(0)
    sample, drawn = AccessSample(TABLES), batch(rng)
    tracemalloc.start()
    try:
        for _ in range(BATCHES):
            sample.add((drawn,))
        full, _ = tracemalloc.get_traced_memory()
        for _ in range(4 * BATCHES):
            sample.add((drawn,))
        later, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert BATCHES // 2 <= sample.batches <= BATCHES
    assert full > 100 * BATCHES, "or batches take nothing"
    assert later < 1.2 * full


def test_what_is_noted_of_a_step_is_two_numbers() -> None:
    spans = Spans()
    tracemalloc.start()
    try:
        for number in range(20_000):
            spans.add(float(number), number + 0.5)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 20 * 20_000
    assert spans.total() == 10_000
