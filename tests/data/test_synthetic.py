"""The generator: the same samples however they are asked for, the published skew, something to learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recpipe.data.config import SyntheticConfig
from recpipe.data.make import open_dataset
from recpipe.data.sources.synthetic import TABLE_ROWS, Popularity
from recpipe.errors import UserError
from tests import generating

pytestmark = pytest.mark.usefixtures("generated_anew")


def joined(dataset, split: str, size: int, first: int = 0) -> list[torch.Tensor]:
    batches = list(dataset.batches(split, size, first))
    names = [feature.name for feature in dataset.schema.sparse]
    ids = [torch.cat([batch.sparse[name].values() for batch in batches]) for name in names]
    lengths = [torch.cat([batch.sparse[name].lengths() for batch in batches]) for name in names]
    return [torch.cat([b.dense for b in batches]), torch.cat([b.labels for b in batches]), *ids, *lengths]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


@pytest.mark.parametrize("pooling", [1, [1, 3, 2]])
def test_batches_do_not_depend_on_size_or_start(pooling):
    config = SyntheticConfig(samples=40000, tables={"a": 1000, "b": 77, "c": 5}, pooling=pooling)
    dataset = open_dataset(config, 3)
    wanted = joined(dataset, "train", 2048)
    assert len(wanted[1]) == dataset.size("train") == 32000
    for size in (1000, 8192, 9000, 32000):
        assert same(joined(open_dataset(config, 3), "train", size), wanted)
    tail = joined(dataset, "train", 1000, first=25)
    assert torch.equal(tail[0], wanted[0][25000:])
    assert torch.equal(tail[1], wanted[1][25000:])
    assert not same(joined(open_dataset(config, 4), "train", 2048), wanted)
    assert open_dataset(config, 4).fingerprint != dataset.fingerprint


def test_a_longer_run_sees_the_same_samples_first():
    short = open_dataset(SyntheticConfig(samples=10000, eval_fraction=0.0), 0)
    long = open_dataset(SyntheticConfig(samples=10**12, eval_fraction=0.5), 0)
    one, other = next(short.batches("train", 4096)), next(long.batches("train", 4096))
    assert torch.equal(one.sparse.values(), other.sparse.values())
    last = next(long.batches("eval", 4096, first=long.num_batches("eval", 4096) - 1))
    assert last.size == 5 * 10**11 % 4096


def test_bags_have_the_asked_mean_length():
    dataset = open_dataset(SyntheticConfig(samples=20000, tables={"a": 100, "b": 100}, pooling=[1, 5]), 0)
    batch = next(dataset.batches("train", 16000))
    lengths = batch.sparse["b"].lengths()
    assert (int(lengths.min()), int(lengths.max())) == (1, 9)
    assert float(lengths.float().mean()) == pytest.approx(5, abs=0.1)
    assert batch.sparse["a"].lengths().unique().tolist() == [1]
    assert 0.2 < float(batch.labels.mean()) < 0.24


# Share of distinct ids, and of lookups, at reuse counts up to 1, 4, 16, 64, 1024 and 16384: Meta's published
# histogram of a batch of 65,536 samples over 856 tables (facebookresearch/dlrm_datasets, 2021, MIT).
PUBLISHED = {
    1: (0.473, 0.069),
    4: (0.764, 0.181),
    16: (0.948, 0.402),
    64: (0.992, 0.580),
    1024: (0.999, 0.787),
    16384: (1.000, 0.957),
}


def reuse_counts(dataset, samples: int) -> np.ndarray:
    batch = next(dataset.batches("train", samples))
    names = batch.sparse.keys()
    return np.concatenate([np.unique(batch.sparse[name].values(), return_counts=True)[1] for name in names])


def deviation(counts: np.ndarray) -> float:
    ids = [abs((counts <= limit).mean() - share) for limit, (share, _) in PUBLISHED.items()]
    total = counts.sum()
    lookups = [abs(counts[counts <= limit].sum() / total - share) for limit, (_, share) in PUBLISHED.items()]
    return float(max(ids + lookups))


def test_reuse_follows_the_published_histogram():
    dataset = open_dataset(SyntheticConfig(samples=100_000), 0)
    counts = reuse_counts(dataset, 65536)
    assert deviation(counts) < 0.03
    assert counts.mean() == pytest.approx(6.9, rel=0.05)
    assert deviation(reuse_counts(dataset, 4096)) > 0.1, (
        "negative control: another batch has another histogram"
    )


def test_ids_are_a_scattered_permutation():
    rows = np.array([2, 3, 10, 1000, 4096], np.int64)
    draw = Popularity(rows, np.arange(5))
    for index, size in enumerate(rows):
        ids = Popularity(rows[[index]], np.array([index])).ids(np.arange(size)[:, None])[:, 0]
        assert sorted(ids) == list(range(size))
    top = np.sort(draw.ids(np.tile(np.arange(10)[:, None], 5))[:, 4])
    assert np.diff(top).min() > 4096 / 50, "the ten most popular ids lie far apart"
    edges = draw.ranks(np.array([[0.0] * 5, [1 - 2**-53] * 5]))
    assert edges.tolist() == [[0] * 5, (rows - 1).tolist()]


def test_rank_frequencies_follow_the_power_law():
    draw = Popularity(np.array([1000]), np.array([1]))
    ranks = draw.ranks(np.random.default_rng(0).random((400_000, 1)))[:, 0]
    power = 1 - 0.89
    wanted = (2**power - 1) / (1001**power - 1)
    assert (ranks == 0).mean() == pytest.approx(wanted, rel=0.02)


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores)] = np.arange(len(scores))
    positive = labels.sum()
    return float(
        (ranks[labels == 1].sum() - positive * (positive - 1) / 2) / positive / (len(labels) - positive)
    )


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_clicks_follow_the_planted_model(seed):
    dataset = open_dataset(SyntheticConfig(samples=100_000), seed)
    batch = next(dataset.batches("train", 60_000))
    labels, chances = batch.labels.numpy(), dataset.probabilities(0, 60_000)
    assert labels.mean() == pytest.approx(0.22, abs=0.01)
    assert chances.mean() == pytest.approx(labels.mean(), abs=0.01)
    assert 0.80 < auc(chances, labels) < 0.85
    linear = np.linalg.lstsq(batch.dense.numpy(), labels, rcond=None)[0]
    assert 0.55 < auc(batch.dense.numpy() @ linear, labels) < 0.75, "dense values alone tell a part"


def test_schema_and_scale():
    dataset = open_dataset(SyntheticConfig(samples=100, table_scale=10), 0)
    assert [feature.rows for feature in dataset.schema.sparse] == [10 * rows for rows in TABLE_ROWS]
    assert len(dataset.schema.dense) == 13
    batch = next(dataset.batches("train", 64))
    for feature in dataset.schema.sparse:
        assert int(batch.sparse[feature.name].values().max()) < feature.rows


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"samples": 0}, "data.samples=0"),
        ({"table_scale": 0.0}, "data.table_scale=0.0"),
        ({"pooling": [1, 2]}, "data.pooling lists 2 features, but there are 26"),
        ({"pooling": 0}, "data.pooling=0"),
        ({"pooling": 1.5}, "data.pooling=1.5"),
        ({"tables": {"a": 1}}, "data.tables.a=1"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(UserError, match=message.replace("[", r"\[")):
        open_dataset(SyntheticConfig(**settings), 0)


def test_what_tests_remember_is_what_is_drawn(monkeypatch) -> None:
    """``tests.generating``; a batch that a test alters stays as it was for the others."""
    config = SyntheticConfig(samples=9000, tables={"a": 100, "b": 7}, pooling=[1, 3])
    drawn = joined(open_dataset(config, 3), "train", 500)
    generating.remember(monkeypatch)
    for batch in open_dataset(config, 3).batches("train", 500):
        batch.dense.zero_()
        batch.sparse.values().zero_()
    assert same(joined(open_dataset(config, 3), "train", 500), drawn)
    assert not same(joined(open_dataset(config, 4), "train", 500), drawn)
