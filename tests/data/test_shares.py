"""Shares of batches: what each of N trainers reads is its part of the whole batch, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from recpipe.data.config import NpyConfig, SyntheticConfig
from recpipe.data.dataset import NumberedDataset
from recpipe.data.make import open_dataset
from recpipe.data.prepared_dataset import PreparedDataset
from recpipe.data.select import select
from recpipe.data.writer import PreparedWriter
from recpipe.distributed.ranks import Ranks, part_of
from recpipe.errors import DataError
from recpipe.plugin.batch import Batch, BatchShare

from .conftest import TABLES
from .test_npy import write as write_npy
from .test_prepared import SCHEMA, some_columns

TRAINERS = (1, 2, 3, 4, 7)
SAMPLES = 101
SIZES = (1, 5, 16, 30, 1000)
"""Batch sizes: of 76 training samples and 25 held out, all but 1 leave a short batch in one split."""


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, NumberedDataset]:
    folder = tmp_path_factory.mktemp("shares")
    with PreparedWriter(folder / "bags", SCHEMA, ["bag/1"]) as writer:
        writer.append(some_columns(SAMPLES, 0))
        writer.finish(rejected_rows=0)
    write_npy(folder / "npy", "day_0", SAMPLES, 1)
    tables = {"a": 1000, "b": 77, "c": 5}
    return {
        "prepared, bags": PreparedDataset(folder / "bags", 0.25, SCHEMA),
        "npy": opened(npy(folder)),
        "synthetic": opened(SyntheticConfig(samples=SAMPLES, eval_fraction=0.25, tables=tables)),
        "synthetic, bags": opened(
            SyntheticConfig(samples=SAMPLES, eval_fraction=0.25, tables=tables, pooling=[1, 3, 2])
        ),
    }


def npy(folder: Path, **settings: object) -> NpyConfig:
    values = {"tables": dict(TABLES), "cache_dir": str(folder / "cache"), "eval_fraction": 0.25, **settings}
    return NpyConfig(path=str(folder / "npy"), **values)


def opened(config: NpyConfig | SyntheticConfig) -> NumberedDataset:
    dataset = open_dataset(config, 3)
    assert isinstance(dataset, NumberedDataset)
    return dataset


def same(left: Batch, right: Batch) -> bool:
    pairs = [(left.dense, right.dense), (left.labels, right.labels)]
    for part in ("values", "lengths", "offsets"):
        pairs.append((getattr(left.sparse, part)(), getattr(right.sparse, part)()))
    typed = all(one.dtype == other.dtype for one, other in pairs)
    return typed and all(torch.equal(one, other) for one, other in pairs)


def shares_of(whole: Batch, count: int) -> Iterator[Batch]:
    """What ``Ranks.shares`` cuts out of a whole batch, for each trainer."""
    ranks = Ranks(world=count, trainers=tuple(range(count)), holders=(0,))
    for part in ranks.shares(0, whole.size):
        yield select(whole, np.arange(part.start, part.stop))


NAMES = ("prepared, bags", "npy", "synthetic", "synthetic, bags")


@pytest.mark.parametrize("count", TRAINERS)
@pytest.mark.parametrize("name", NAMES)
def test_a_share_is_what_the_whole_batch_holds_for_that_trainer(datasets, name, count):
    dataset = datasets[name]
    empty = 0
    for split in ("train", "eval"):
        for size in SIZES:
            whole = list(dataset.batches(split, size))
            own = [list(dataset.batches(split, size, 0, (index, count))) for index in range(count)]
            assert {len(batches) for batches in own} == {dataset.num_batches(split, size)} == {len(whole)}
            for batch, shares in zip(whole, zip(*own, strict=True), strict=True):
                assert all(isinstance(share, BatchShare) and share.total == batch.size for share in shares)
                assert all(map(same, shares, shares_of(batch, count)))
                assert sum(share.size for share in shares) == batch.size
                empty += sum(share.size == 0 for share in shares)
    assert bool(empty) == (count > 1), "the sizes must make shares without samples"


@pytest.mark.parametrize("name", NAMES)
def test_every_sample_is_in_one_share_of_an_epoch(datasets, name):
    dataset = datasets[name]
    whole = next(dataset.batches("train", SAMPLES))
    for count in TRAINERS:
        parts = zip(*[dataset.batches("train", 16, 0, (index, count)) for index in range(count)], strict=True)
        shares = [share for batch in parts for share in batch]
        assert torch.equal(torch.cat([share.dense for share in shares]), whole.dense)
        assert torch.equal(torch.cat([share.labels for share in shares]), whole.labels)
        for feature in dataset.schema.sparse:
            ids = torch.cat([share.sparse[feature.name].values() for share in shares])
            assert torch.equal(ids, whole.sparse[feature.name].values())


@pytest.mark.parametrize("name", NAMES)
def test_a_share_resumes_at_any_batch(datasets, name):
    dataset = datasets[name]
    whole = list(dataset.batches("train", 16, 0, (2, 3)))
    for first in range(len(whole) + 2):
        rest = list(dataset.batches("train", 16, first, (2, 3)))
        assert len(rest) == max(0, len(whole) - first)
        assert all(map(same, rest, whole[first:]))


def test_a_share_across_blocks_of_the_generator():
    dataset = opened(SyntheticConfig(samples=30_000, eval_fraction=0.0, tables={"a": 50}, pooling=2))
    for batch, own in zip(
        dataset.batches("train", 25_000), dataset.batches("train", 25_000, 0, (1, 2)), strict=True
    ):
        assert same(own, list(shares_of(batch, 2))[1])


def test_a_share_reads_no_other_samples(datasets, monkeypatch):
    dataset = datasets["npy"]
    asked: list[tuple[int, int]] = []
    cut = dataset.samples_between
    monkeypatch.setattr(
        dataset, "samples_between", lambda low, high: (asked.append((low, high)), cut(low, high))[1]
    )
    list(dataset.batches("train", 30, 0, (1, 4)))
    assert asked == [(8, 16), (38, 46), (64, 68)]


@pytest.mark.parametrize(("low", "high"), [(0, 0), (3, 4), (5, 16), (0, 1000)])
def test_parts_are_neighbours_of_nearly_equal_size(low, high):
    for count in TRAINERS:
        parts = [part_of(low, high, (index, count)) for index in range(count)]
        assert [low, *(part.stop for part in parts)] == [*(part.start for part in parts), high]
        sizes = [part.stop - part.start for part in parts]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[-1] <= 1


def test_drop_leaves_out_the_short_batch_alone(datasets, tmp_path):
    write_npy(tmp_path / "npy", "day_0", SAMPLES, 1)
    kept = opened(npy(tmp_path, batch_size=16))
    dropped = opened(npy(tmp_path, batch_size=16, last_batch="drop"))
    assert (kept.size("train"), kept.num_batches("train", 16), kept.dropped_samples) == (76, 5, 0)
    assert (dropped.size("train"), dropped.num_batches("train", 16), dropped.dropped_samples) == (64, 4, 12)
    assert all(map(same, dropped.batches("train", 16), list(kept.batches("train", 16))[:4]))
    for one, other in zip(dropped.batches("eval", 16), kept.batches("eval", 16), strict=True):
        assert same(one, other), "the held-out part begins where it did, and stays whole"
    assert dropped.fingerprint != kept.fingerprint, "data positions of one mean nothing in the other"
    for index in range(3):
        sizes = [share.size for share in dropped.batches("train", 16, 0, (index, 3))]
        assert sizes == [(6, 5, 5)[index]] * 4


def test_drop_without_a_short_batch_changes_nothing(tmp_path):
    write_npy(tmp_path / "npy", "day_0", SAMPLES, 1)
    kept = opened(npy(tmp_path, batch_size=19))
    dropped = opened(npy(tmp_path, batch_size=19, last_batch="drop"))
    assert (dropped.fingerprint, dropped.size("train"), dropped.dropped_samples) == (kept.fingerprint, 76, 0)


def test_drop_that_leaves_no_batch_is_refused(tmp_path):
    write_npy(tmp_path / "npy", "day_0", SAMPLES, 1)
    with pytest.raises(DataError, match="last_batch=drop leaves no batch of data.batch_size=77: .* 76 train"):
        opened(npy(tmp_path, batch_size=77, last_batch="drop"))
