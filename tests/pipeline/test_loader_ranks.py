"""One data set over several trainers: each reads its own samples where it may, and all train every sample."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from recpipe.data.config import SyntheticConfig
from recpipe.data.dataset import Dataset
from recpipe.data.make import open_dataset
from recpipe.distributed.ranks import Ranks
from recpipe.pipeline.batch import InFlight
from recpipe.plugin.api import EpochOrder, Link
from recpipe.plugin.errors import PluginError
from recpipe.plugin.splitter import Split
from tests.pipeline.samples import Listed, collection_of, eval_loader_of, loader_of
from tests.pipeline.test_loader import fail, same

TRAINERS = (2, 3, 4, 7)
SIZE = 32


def several(count: int) -> list[Ranks]:
    everyone = tuple(range(count))
    return [Ranks(rank, count, everyone, everyone) for rank in everyone]


def unchanged(batch):
    return batch


def generated(**settings: object) -> Dataset:
    tables = {"a": 100, "b": 9}
    values = {"samples": 451, "batch_size": SIZE, "tables": tables, "pooling": [1, 3], **settings}
    return open_dataset(SyntheticConfig(**values), 5)  # type: ignore[arg-type]


def equal(one: InFlight, other: InFlight) -> bool:
    """Whether training gets the same from both."""
    told = [(s.total, s.consumed, s.alone, s.bounds, s.moving) for s in (one, other)]
    return told[0] == told[1] and same(one.batch, other.batch)


@pytest.mark.parametrize("count", TRAINERS)
def test_shares_that_are_read_are_the_shares_that_are_cut(count) -> None:
    """A transform that does nothing makes each rank read whole batches; the last one has 9 samples."""
    dataset = generated()
    whole = list(loader_of(dataset))
    assert [staged.total for staged in whole] == [SIZE] * 11 + [9]
    lookups = 0
    epochs = []
    for ranks in several(count):
        reading = loader_of(dataset, ranks=ranks)
        cutting = loader_of(dataset, ranks=ranks, batch=[Link(unchanged)])
        epochs.append(list(reading))
        assert len(epochs[-1]) == len(reading) == len(whole)
        assert all(map(equal, epochs[-1], cutting))
        assert reading.lookups == cutting.lookups
        lookups += reading.lookups
    assert lookups == sum(staged.batch.sparse.values().numel() for staged in whole)
    for batch, shares in zip(whole, zip(*epochs, strict=True), strict=True):
        assert torch.equal(torch.cat([share.batch.dense for share in shares]), batch.batch.dense)
        assert torch.equal(torch.cat([share.batch.labels for share in shares]), batch.batch.labels)


@pytest.mark.parametrize("last_batch", ["keep", "drop"])
def test_a_resumed_share_goes_on_where_it_stopped(last_batch) -> None:
    dataset = generated(last_batch=last_batch)
    loader = loader_of(dataset, ranks=several(3)[1])
    whole = list(loader)
    assert len(whole) == len(loader) == (12 if last_batch == "keep" else 11)
    for first in (1, 6, len(whole) - 1):
        loader.first = first
        rest = list(loader)
        assert len(rest) == len(whole) - first
        assert all(map(equal, rest, whole[first:]))
    assert len(list(loader)) == len(whole), "the next epoch starts at 0"


class Reversed(EpochOrder):
    def __init__(self, dataset: Listed) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset.lists["train"])

    def batches(self, first):
        return iter(self.dataset.lists["train"][::-1][first:])


@pytest.mark.parametrize("kind", ["none", "stream", "batch", "splitter", "order", "tiers"])
def test_whole_batches_are_read_where_something_looks_at_them(tmp_path, monkeypatch, kind) -> None:
    dataset = Listed()
    parts = {
        "stream": {"stream": [Link(unchanged)]},
        "batch": {"batch": [Link(unchanged)]},
        "splitter": {"splitter": lambda batch, cold: Split(np.arange(batch.size), (batch.size,))},
        "order": {"order": Reversed(dataset)},
        "tiers": {"embeddings": collection_of("lru", "sgd", tmp_path)},
    }
    asked = []
    batches = dataset.batches
    monkeypatch.setattr(
        dataset, "batches", lambda *arguments: (asked.append(arguments[3]), batches(*arguments))[1]
    )
    loader = loader_of(dataset, ranks=several(2)[1], **parts.get(kind, {}))  # type: ignore[arg-type]
    staged = next(iter(loader))
    assert asked == {"none": [(1, 2)], "order": []}.get(kind, [None])
    assert (staged.total, staged.batch.size, staged.alone) == (
        (7, 3, False) if kind == "order" else (32, 16, False)
    )


@pytest.mark.parametrize("count", TRAINERS)
def test_evaluation_scores_every_held_out_sample_once(count) -> None:
    dataset = generated(last_batch="drop")
    loaders = [eval_loader_of(dataset, ranks) for ranks in several(count)]
    assert {len(loader) for loader in loaders} == {3}
    shares = [share for batch in zip(*loaders, strict=True) for share in batch]
    held_out = next(dataset.batches("eval", 1000))
    assert held_out.size == dataset.size("eval") == 90
    assert torch.equal(torch.cat([share.dense for share in shares]), held_out.dense)
    assert torch.equal(torch.cat([share.labels for share in shares]), held_out.labels)


def readers() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(("recpipe-reader", "recpipe-loader"))]


@pytest.mark.parametrize("depth", [1, 4])
def test_reading_ahead_changes_nothing(depth) -> None:
    expected = list(loader_of(generated()))
    for first in (0, 5):
        loader = loader_of(generated(read_ahead=depth))
        loader.first = first
        assert all(map(equal, loader, expected[first:]))
    share = several(3)[2]
    ahead, plain = (loader_of(generated(read_ahead=n), ranks=share) for n in (depth, 0))
    assert all(map(equal, ahead, plain))
    assert not readers()


@pytest.mark.parametrize("link", [None, Link(fail)])
def test_reading_ahead_ends_with_the_epoch_however_it_ends(link) -> None:
    loader = loader_of(generated(read_ahead=4), batch=[link] if link else [])
    batches = iter(loader)
    if link:
        with pytest.raises(PluginError, match="raised ZeroDivisionError"):
            next(batches)
    else:
        next(batches)
    del batches
    assert not readers()
