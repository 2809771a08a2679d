"""Tables that several features share, weighted bags and rows that are not pooled, against plain TorchRec: one
update of the sum."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe import private_api
from recpipe.tables.resident import ResidentCollection
from tests.tables import samples
from tests.tables.reference import (
    BATCHES,
    FEATURES,
    SEQUENCES,
    SUMS,
    TABLES,
    TOLERANCE,
    WEIGHTED,
    Kind,
    batches,
    expected,
    loss_of,
    one_feature_at_a_time,
    plain_module,
    plain_rows,
    train,
    train_ahead,
)
from tests.tables.samples import CPU, MAKERS, difference, dump, here, identical, stream, table_set, tiers

OPTIMIZERS = tuple(TOLERANCE)
POOLED = (SUMS, WEIGHTED)


def of_kinds(*kinds: Kind) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind", kinds, ids=lambda kind: kind.name)


def test_features_of_a_table_look_up_the_same_rows() -> None:
    """Without it, the tests here would show nothing."""
    for sparse in batches():
        clicked, carted = (set(sparse[name].values().tolist()) for name in ("clicked", "carted"))
        assert len(clicked & carted) > 1


@of_kinds(*POOLED, SEQUENCES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("groups", [1, 2, len(TABLES)])
def test_resident_tables_are_plain_ones(kind: Kind, optimizer: str, groups: int) -> None:
    if groups > 1 and here().type != "cpu":
        with pytest.raises(ValueError, match="only on a CPU can a lookup have several TBEs"):
            ResidentCollection(kind.tables(optimizer), here(), groups)
        return
    collection = ResidentCollection(kind.tables(optimizer), here(), groups)
    train(collection, kind, batches())
    assert difference(dump(collection), expected(kind, optimizer)) <= TOLERANCE[optimizer]
    collection.close()


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        # Adagrad's states move with rows of every kind alike.
        pytest.param(
            kind,
            optimizer,
            id=f"{optimizer}-{kind.name}",
            marks=[pytest.mark.soak] * (optimizer == "adagrad" and kind is not SUMS),
        )
        for kind in (*POOLED, SEQUENCES)
        for optimizer in OPTIMIZERS
    ],
)
@pytest.mark.parametrize("policy", MAKERS)
def test_tiers_are_plain_tables(kind: Kind, optimizer: str, policy: str, tmp_path: Path) -> None:
    left = []
    for store, prefetch, loop in (
        ("host", True, train_ahead),
        ("ssd", True, train_ahead),
        ("host", False, train),
    ):
        collection = tiers(kind.tables(optimizer), policy, tmp_path, store, prefetch)
        loop(collection, kind, batches())
        assert collection.io.rows_read > 0
        left.append(dump(collection))
        collection.close()
    assert difference(left[0], expected(kind, optimizer)) <= TOLERANCE[optimizer]
    assert all(identical(other, left[0]) for other in left[1:])


@of_kinds(*POOLED)
def test_pooled_rows_are_plain_ones_whatever_the_order_of_features(kind: Kind, tmp_path: Path) -> None:
    tables = kind.tables("sgd")
    plain = plain_module(tables)
    sparse = batches(1)[0]
    turned = sparse.permute([3, 0, 5, 1, 4, 2])
    assert turned.keys() != list(FEATURES)
    for collection in (
        ResidentCollection(tables, CPU),
        ResidentCollection(tables, CPU, 2),
        tiers(tables, "lru", tmp_path),
    ):
        for ids in (sparse, turned):
            for training in (True, False):
                rows = collection.train(training).lookup(ids)
                torch.testing.assert_close(rows, plain_rows(plain, tables, ids), rtol=1e-6, atol=1e-6)
            named = collection(ids)
            assert named.keys() == list(FEATURES)
            torch.testing.assert_close(named["left"], plain(ids)["left"], rtol=1e-6, atol=1e-6)
        collection.close()


# -- negative controls -------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["resident", "lru"])
def test_an_update_for_each_feature_is_noticed(policy: str, tmp_path: Path) -> None:
    """A row that two features look up gets one step of its summed gradient, and not two steps."""
    tables = SUMS.tables("rowwise_adagrad")
    collection = ResidentCollection(tables, CPU) if policy == "resident" else tiers(tables, policy, tmp_path)
    whole = loss_of(SUMS)
    for sparse in batches():
        for part in one_feature_at_a_time([sparse]):
            columns = torch.tensor([name in _features(part) for name in FEATURES]).repeat_interleave(
                tables.dim
            )
            whole(collection.lookup(part) * columns, sparse).backward()
    assert difference(dump(collection), expected(SUMS, "rowwise_adagrad")) > 1e-3
    collection.close()


def _features(sparse: KeyedJaggedTensor) -> set[str]:
    counts = dict(zip(sparse.keys(), sparse.length_per_key(), strict=True))
    return {name for name, count in counts.items() if count}


@pytest.mark.parametrize("policy", ["resident", "lru"])
def test_bags_without_their_weights_are_noticed(policy: str, tmp_path: Path) -> None:
    tables = SUMS.tables("sgd")
    collection = ResidentCollection(tables, CPU) if policy == "resident" else tiers(tables, policy, tmp_path)
    train(collection, WEIGHTED, batches())
    assert difference(dump(collection), expected(WEIGHTED, "sgd")) > 0.01
    collection.close()


# -- one physical table of slots for all tables ------------------------------------------------


def test_slots_are_updated_table_by_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that tiers make the bits of a physical table for each; by FBGEMM's loop for shared tables they are
    almost the same."""
    whole = ResidentCollection(table_set("rowwise_adagrad"), CPU)
    samples.train(whole, stream(BATCHES, True))
    by_table = tiers(table_set("rowwise_adagrad"), "lru", tmp_path)
    samples.train_ahead(by_table, stream(BATCHES, True))
    assert identical(dump(by_table), dump(whole))
    monkeypatch.setattr(private_api, "update_by_table", lambda *_: None)
    shared = tiers(table_set("rowwise_adagrad"), "lru", tmp_path)
    samples.train_ahead(shared, stream(BATCHES, True))
    assert not identical(dump(shared), dump(whole))
    assert difference(dump(shared), dump(whole)) <= 1e-5


def test_features_of_one_table_taken_for_tables_of_their_own_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = private_api.update_by_table

    def of_every_feature(tbe: object, rows: int, table_of: np.ndarray) -> None:
        right(tbe, rows, np.arange(len(table_of)))  # type: ignore[arg-type]

    monkeypatch.setattr(private_api, "update_by_table", of_every_feature)
    collection = tiers(SUMS.tables("rowwise_adagrad"), "lru", tmp_path)
    train_ahead(collection, SUMS, batches())
    assert difference(dump(collection), expected(SUMS, "rowwise_adagrad")) > 1e-3
    collection.close()
