"""Tiers against one big table: same tables, same optimizer state, whatever moves where and when."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.errors import DataError
from recpipe.tables.resident import ResidentCollection
from recpipe.tables.tiers.layout import Section
from tests.tables.samples import (
    DIM,
    FEATURES,
    MAKERS,
    difference,
    dump,
    here,
    identical,
    jagged,
    pooled_now,
    stream,
    table_set,
    tiers,
    train,
    train_ahead,
)

OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")
BATCHES = 20


@pytest.fixture(scope="module")
def expected():
    """``expected(optimizer, multi)``: tables and evaluations of the run with all rows resident."""
    known: dict[tuple[str, bool], tuple] = {}

    def of(optimizer: str, multi: bool):
        if (optimizer, multi) not in known:
            collection = ResidentCollection(table_set(optimizer), here())
            seen = train(collection, stream(BATCHES, multi), eval_every=7)
            known[optimizer, multi] = (dump(collection), seen)
        return known[optimizer, multi]

    return of


@pytest.mark.parametrize(
    ("multi", "store"),
    [
        pytest.param(False, "host", id="one-hot-host"),
        # Each store, and both numbers of ids, are held beside it.
        pytest.param(False, "ssd", id="one-hot-ssd", marks=pytest.mark.soak),
        pytest.param(True, "host", id="multi-hot-host"),
        pytest.param(True, "ssd", id="multi-hot-ssd"),
    ],
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("policy", MAKERS)
def test_equals_resident_tables(expected, tmp_path, policy, optimizer, multi, store) -> None:
    tables, evaluations = expected(optimizer, multi)
    outcomes = []
    ways = [(False, train_ahead, 0), (True, train_ahead, 7)]
    ways += [(False, train, 7), (True, train_ahead, 0)] if store == "host" else []
    for prefetch, loop, every in ways:
        collection = tiers(table_set(optimizer), policy, tmp_path, store, prefetch)
        seen = loop(collection, stream(BATCHES, multi), every)
        outcomes.append((dump(collection), collection.placement_state()["row_of_slot"]))
        collection.close()
        for mine, theirs in zip(seen, evaluations if every else [], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    first, residents = outcomes[0]
    for other, slots in outcomes[1:]:
        assert identical(other, first), "fetching ahead or evaluating changed the tables"
        np.testing.assert_array_equal(slots, residents)
    assert identical(first, tables)


def test_moving_weights_without_their_state_is_wrong(expected, tmp_path, monkeypatch) -> None:
    put = Section.put

    def weights_only(section, places, records) -> None:
        put(section, places, torch.cat((records[:, :DIM], torch.zeros_like(records[:, DIM:])), dim=1))

    monkeypatch.setattr(Section, "put", weights_only)
    collection = tiers(table_set("adagrad"), "lru", tmp_path)
    train_ahead(collection, stream(BATCHES, True))
    weights = {t: records[:, :DIM] for t, records in dump(collection).items()}
    right = {t: records[:, :DIM] for t, records in expected("adagrad", True)[0].items()}
    assert difference(weights, right) > 0.05
    collection.close()


@pytest.mark.parametrize("policy", ["nocache", "hot"])
def test_fetching_ahead_without_the_rows_in_flight_is_wrong(expected, tmp_path, policy) -> None:
    collection = tiers(table_set("sgd"), policy, tmp_path)
    collection.planner.carry = False
    train_ahead(collection, stream(BATCHES, True))
    assert difference(dump(collection), expected("sgd", True)[0]) > 0.01
    collection.close()


@pytest.mark.parametrize("policy", MAKERS)
def test_only_rows_of_the_batch_change(tmp_path, policy) -> None:
    collection = tiers(table_set("adagrad"), policy, tmp_path)
    batches = stream(16, True)
    before = dump(collection)

    def changed_rows(index: int) -> None:
        nonlocal before
        now = dump(collection)
        for feature in FEATURES:
            ids = set(batches[index][feature.name].values().tolist())
            changed = np.flatnonzero((now[feature.name] != before[feature.name]).any(axis=1))
            assert set(changed.tolist()) == ids
        before = now

    train_ahead(collection, batches, after=changed_rows)
    collection.close()


@pytest.mark.parametrize("policy", MAKERS)
@pytest.mark.parametrize("size", [1, 3])
def test_tiny_batches(tmp_path, policy, size) -> None:
    rng = np.random.default_rng(1)
    empty = KeyedJaggedTensor(
        [f.name for f in FEATURES],
        torch.empty(0, dtype=torch.int64),
        lengths=torch.zeros(len(FEATURES) * size, dtype=torch.int64),
    ).to(here())
    batches = [
        empty,
        *(jagged(rng, size, True) for _ in range(10)),
        empty,
        *(jagged(rng, size, True) for _ in range(3)),
    ]
    both = ResidentCollection(table_set("sgd"), here()), tiers(table_set("sgd"), policy, tmp_path)
    for collection in both:
        for index, batch in enumerate(batches):
            pooled = collection(batch).values()
            if batch is empty:
                assert not pooled.any()
                assert not pooled_now(collection, batch).any()
            (pooled * (index + 1)).sum().backward()
    assert identical(dump(both[0]), dump(both[1]))
    both[1].close()


def test_features_are_found_by_name(tmp_path) -> None:
    """A KJT may hold its features in another order than the tables, as with TorchRec's own collection."""
    batch = stream(1, True)[0]
    turned = batch.permute([2, 0, 1])
    assert turned.keys() == ["c", "a", "b"]
    resident = ResidentCollection(table_set("sgd"), here())
    collection = tiers(table_set("sgd"), "lru", tmp_path)
    for sparse in (batch, turned):
        expected = resident(sparse)
        for pooled in (collection(sparse), collection.eval()(sparse)):
            for name in ("a", "b", "c"):
                torch.testing.assert_close(pooled[name], expected[name])
        collection.train()
    collection.close()


def test_evaluation_moves_nothing(tmp_path) -> None:
    collection = tiers(table_set(), "lru", tmp_path, prefetch=False)
    batches = stream(8, True)
    train(collection, batches[:4])
    residents, read, written = (
        collection.planner.row_of_slot.copy(),
        collection.io.rows_read,
        collection.io.rows_written,
    )
    for batch in batches:
        pooled_now(collection, batch)
    np.testing.assert_array_equal(collection.planner.row_of_slot, residents)
    assert collection.io.rows_read == read, "evaluation's traffic is not training's"
    assert collection.io.rows_written - written <= len(FEATURES) * 4 * 32
    assert collection.store.io.rows_read > read
    collection.close()


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("policy", MAKERS)
def test_values_written_between_batches_are_used(tmp_path, policy, prefetch) -> None:
    """Also those of rows that the slab still holds for the next batch."""
    batches = stream(3, True)
    collection = tiers(table_set("sgd"), policy, tmp_path, prefetch=prefetch)
    train(collection, batches)
    for region in collection.regions():
        _, state = collection.read(region)
        ids = np.arange(region.start, region.stop, dtype=np.float32)
        collection.write(region, (np.repeat(ids[:, None], DIM, axis=1), state))
        assert collection.read(region)[0][:, 0].tolist() == ids.tolist()
    pooled = collection(batches[-1])
    for feature in FEATURES:
        bags = batches[-1][feature.name].to_dense()
        sums = [float(bag.sum()) for bag in bags]
        assert pooled[feature.name][:, 0].tolist() == pytest.approx(sums)
    collection.close()


@pytest.mark.parametrize("bad", [-1, 10**6])
def test_an_id_outside_of_its_table_is_an_error(bad: int, tmp_path: Path) -> None:
    collection = tiers(table_set("sgd"), "nocache", tmp_path)
    names = [feature.name for feature in FEATURES]
    ids = torch.zeros(len(names), dtype=torch.int64)
    ids[1] = bad
    sparse = KeyedJaggedTensor(names, ids, lengths=torch.ones(len(names), dtype=torch.int64))
    with pytest.raises(DataError, match=f"id {bad} of feature {names[1]} is not in its table"):
        collection.input_dist(sparse)
