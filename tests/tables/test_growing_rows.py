"""Rows of ids that grow: nobody's until they are given, and begun anew with each optimizer's state."""

from __future__ import annotations

from dataclasses import replace
from mmap import PAGESIZE
from pathlib import Path

import numpy as np
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.plugin.tables import Growth, Table, TableOptimizer, TableSet
from recpipe.tables.dynamic.growing import GrowingTables
from recpipe.tables.dynamic.loops import FIRST_ROW
from recpipe.tables.groups import ModelTables
from recpipe.tables.resident import ResidentCollection
from recpipe.tables.stores.local import HostStore

CPU, DIM, ROWS = torch.device("cpu"), 4, 12
OPTIMIZERS = {
    "sgd": TableOptimizer("sgd", 0.1),
    "momentum": TableOptimizer("sgd", 0.1, momentum=0.9),
    "decay": TableOptimizer("adagrad", 0.1, weight_decay=0.01),
    **{
        name: TableOptimizer(name, 0.1)
        for name in ("adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam")
    },
    **{name: TableOptimizer(name, 0.1) for name in ("lamb", "partial_rowwise_lamb", "ftrl")},
}


def tables_of(rows: int, dim: int, optimizer: TableOptimizer, free: bool = True) -> TableSet:
    """One table, of one feature."""
    made = ModelTables.single(TableSet((Table("t", rows, ("a",)),), dim, optimizer, 1))
    return (made.growing({"a"}) if free else made).groups[0].tables


def ids(keys: list[int]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["a"], torch.tensor(keys), lengths=torch.ones(len(keys), dtype=torch.int64))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_row_that_changes_hands_has_its_weights_and_state_anew(name: str) -> None:
    tables = tables_of(ROWS, DIM, OPTIMIZERS[name])
    collection = ResidentCollection(tables, CPU, padded=False)
    growing = GrowingTables({"a": Growth("t")}, ModelTables.single(tables), [collection], 1)

    def records_of(keys: list[int], train: bool) -> torch.Tensor:
        batch, plan = growing.plan(ids(keys))
        growing.begin(plan)
        if train:
            collection.lookup(batch).sum().backward()  # type: ignore[no-untyped-call]
        return collection.records_of(batch.values().numpy())

    first = records_of([1, 2, 3], train=False)
    trained = records_of(list(range(1, ROWS - 1)), train=True)
    assert not torch.equal(trained[:3], first)
    if trained.shape[1] > DIM:
        assert trained[:, DIM:].abs().sum(1).all()
    records_of(list(range(100, 100 + ROWS - FIRST_ROW)), train=True)  # all lose their rows
    again = records_of([3, 1, 2], train=False)
    assert torch.equal(again, first[[2, 0, 1]])
    assert not again[:, DIM:].any()


def test_a_models_own_first_values_are_made_once() -> None:
    """A row that changes hands has them again, and no batch waits for those of the whole table."""
    made, calls = np.random.default_rng(0).random((ROWS, DIM), np.float32), []

    def first(start: int, stop: int) -> np.ndarray:
        calls.append((start, stop))
        return made[start:stop]

    tables = tables_of(ROWS, DIM, OPTIMIZERS["adagrad"])
    tables = replace(tables, tables=(replace(tables.tables[0], first=first),))
    collection = ResidentCollection(tables, CPU, padded=False)
    growing = GrowingTables({"a": Growth("t")}, ModelTables.single(tables), [collection], 1)
    for number in range(6):
        batch, plan = growing.plan(ids(list(range(8 * number, 8 * number + 8))))
        growing.begin(plan)
        rows = batch.values().numpy()
        assert np.array_equal(collection.records_of(rows)[:, :DIM].numpy(), made[rows])
        collection.lookup(batch).sum().backward()  # type: ignore[no-untyped-call]
    assert calls == [(0, FIRST_ROW), (0, ROWS)]


def in_memory() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGESIZE


@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize("place", ["resident", "host"])
def test_rows_that_no_id_has_take_no_memory(place: str, free: bool) -> None:
    tables = tables_of(1_000_000, 16, TableOptimizer("adagrad", 0.1), free)
    before = in_memory()
    if place == "resident":
        held = ResidentCollection(tables, CPU, padded=False)
        rows = held.records_of(np.array([0, 1, 2, 999_999])).numpy()
    else:
        store, rows = HostStore(tables.layout, tables.fill), np.empty((4, 32), np.float32)
        store.gather(np.array([0, 1, 2, 999_999]), rows)
    taken = in_memory() - before
    assert (taken < 0.4 * tables.total_bytes) == free
    assert rows[:2, :16].all()
    assert rows[2:].any() != free


def test_features_of_a_map_may_lie_apart_in_a_batch_of_any_type() -> None:
    """Two parts of a batch, in one of them a feature of another table between two of one that grows."""
    names = {"t": ("a", "c", "e"), "u": ("d",), "fixed": ("b",)}
    optimizer = TableOptimizer("sgd", 0.1)
    tables = ModelTables.single(
        TableSet(tuple(Table(name, 40, own) for name, own in names.items()), DIM, optimizer, 1)
    )
    collection = ResidentCollection(tables.groups[0].tables, CPU, padded=False)
    growing = GrowingTables(
        {name: Growth(table) for table in ("t", "u") for name in names[table]}, tables, [collection], 1
    )
    lengths = [[2, 0], [1, 1], [0, 3], [1, 0]]
    first = KeyedJaggedTensor(
        list("abcd"),
        torch.tensor([71, 72, 5, 6, 73, 71, 74, 71]),
        lengths=torch.tensor(lengths).view(-1),
    )
    other = KeyedJaggedTensor(["e"], torch.tensor([74, 75]), lengths=torch.tensor([1, 1]))
    batch = {"first": first, "dense": torch.ones(2, 1), "more": [other]}
    made, plan = growing.plan(batch)
    growing.begin(plan)
    assert made["first"].values().tolist() == [2, 3, 5, 6, 4, 2, 5, 2]
    assert made["first"].lengths().tolist() == first.lengths().tolist()
    assert made["more"][0].values().tolist() == [5, 6]
    assert made["dense"] is batch["dense"]
    assert first.values().tolist() == [71, 72, 5, 6, 73, 71, 74, 71], "the batch's own ids stay"
    again = growing.rows_of(batch)
    assert again["first"].values().tolist() == made["first"].values().tolist()
    assert growing.unknown == 0
