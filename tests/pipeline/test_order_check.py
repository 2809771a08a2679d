"""An epoch order that does not hold every sample once ends the run, by its plugin's name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from recpipe.data.select import select
from recpipe.pipeline import source
from recpipe.pipeline.loader import TrainLoader
from recpipe.pipeline.source import BatchSource
from recpipe.plugin.api import Contribution, EpochOrder, Invariant
from recpipe.plugin.assembly import assemble
from recpipe.plugin.batch import Batch
from recpipe.plugin.errors import PluginError
from recpipe.tables.resident import ResidentCollection
from tests.pipeline.samples import CPU, SIZE, Listed, groups_of, inputs_of
from tests.plugin.samples import ACME, TABLES, Good

COUNT = 5


class Given(EpochOrder):
    """``batches``, which say that they are ``count``."""

    def __init__(self, batches: list[Batch], count: int = COUNT) -> None:
        self.given, self.count = batches, count

    def __len__(self) -> int:
        return self.count

    def batches(self, first: int) -> Iterator[Batch]:
        return iter(self.given[first:])


class Declared(Good):
    alters = frozenset({Invariant.SAMPLE_ORDER, Invariant.SAMPLE_SET})


def loader_of(dataset: Listed, order: EpochOrder, plugin: Any = None) -> TrainLoader:
    assembly = assemble([(ACME, plugin or Good(), Contribution(order=order))], TABLES)
    inputs = inputs_of(dataset)
    groups = groups_of(ResidentCollection(inputs.tables.groups[0].tables, CPU))
    return TrainLoader(BatchSource(dataset, SIZE, assembly.feed), inputs, groups, CPU)


def made(dataset: Listed, how: str) -> EpochOrder:
    batches = list(dataset.lists["train"])
    last = batches[-1]
    if how == "backwards":
        return Given(batches[::-1])
    if how == "repeats":
        return Given([*batches[:-1], select(batches[0], np.arange(last.size))])
    if how == "changes":
        other = select(last, np.arange(last.size))
        other.dense[0, 0] += 1
        return Given([*batches[:-1], other])
    if how == "other ids":
        other = select(last, np.arange(last.size))
        values = other.sparse.values()
        values[0] = 1 - values[0].clamp(max=1)
        return Given([*batches[:-1], other])
    if how == "lacks a sample":
        return Given([*batches[:-1], select(last, np.arange(1, last.size))])
    assert how == "lacks a batch"
    return Given(batches[:-1])


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("repeats", "some are left out, repeated or changed"),
        ("changes", "some are left out, repeated or changed"),
        ("other ids", "some are left out, repeated or changed"),
        ("lacks a sample", "yielded 134 samples of the data's 135"),
        ("lacks a batch", "yielded 4 batches, and its length is 5"),
    ],
)
def test_is_refused_by_name(how: str, said: str) -> None:
    dataset = Listed(count=COUNT)
    loader = loader_of(dataset, made(dataset, how))
    with pytest.raises(PluginError, match=f"plugin 'acme'.*{said}.*Invariant.SAMPLE_SET"):
        list(loader)
    assert len(list(loader_of(dataset, made(dataset, how), Declared()))) in (4, 5)


def test_every_sample_once_in_any_order_passes_in_each_epoch() -> None:
    dataset = Listed(count=COUNT)
    loader = loader_of(dataset, made(dataset, "backwards"))
    for _ in range(2):
        assert len(list(loader)) == COUNT


def test_an_epoch_that_began_in_its_middle_is_not_judged() -> None:
    dataset = Listed(count=COUNT)
    loader = loader_of(dataset, made(dataset, "repeats"))
    loader.first = 2
    assert len(list(loader)) == COUNT - 2


def test_an_epoch_that_ends_early_is_not_judged() -> None:
    dataset = Listed(count=COUNT)
    loader = loader_of(dataset, made(dataset, "repeats"))
    batches = iter(loader)
    next(batches)
    loader.end_epoch()


def test_the_data_is_read_once_for_all_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_contents", {})
    dataset, reads = Listed(count=COUNT), []
    batches = dataset.batches

    def counted(*arguments: Any) -> Iterator[Batch]:
        reads.append(arguments)
        return batches(*arguments)

    monkeypatch.setattr(dataset, "batches", counted)
    loader = loader_of(dataset, made(dataset, "backwards"))
    for _ in range(3):
        list(loader)
    assert len(reads) == 1


def test_data_that_may_read_differently_again_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = Listed(count=COUNT)
    monkeypatch.setattr(dataset, "rereads", False)
    assert len(list(loader_of(dataset, made(dataset, "repeats")))) == COUNT
