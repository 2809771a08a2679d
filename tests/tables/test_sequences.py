"""Tables whose rows are not pooled, one row for each id, against TorchRec's ``EmbeddingCollection``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.data.select import select
from recpipe.tables.resident import ResidentCollection
from recpipe.tables.tiers.tiered import TieredEmbeddingBagCollection, TieredRows
from tests.tables.reference import (
    FEATURES,
    SEQUENCES,
    SIZE,
    batches,
    expected,
    loss_of,
    one_feature_at_a_time,
    plain_module,
    plain_rows,
    train,
    train_ahead,
    trained_plainly,
    weights_of,
)
from tests.tables.samples import CPU, DIM, MAKERS, difference, dump, identical, tiers

LOSS = loss_of(SEQUENCES)


@pytest.mark.parametrize("policy", ["resident", *MAKERS])
def test_rows_are_those_of_the_ids_bit_for_bit(policy: str, tmp_path: Path) -> None:
    """Nothing is added up: not only almost."""
    tables = SEQUENCES.tables("sgd")
    collection = ResidentCollection(tables, CPU) if policy == "resident" else tiers(tables, policy, tmp_path)
    if policy == "resident":
        taken = collection.input_dist(batches(1)[0])
        taken.wants_padding = True
        collection.compute(taken, True, True)
        assert taken.padding == 0
    plain = plain_module(tables)
    for sparse in batches(4):
        for training in (True, False):
            rows = collection.train(training).lookup(sparse)
            assert rows.shape == (len(sparse.values()), DIM)
            assert torch.equal(rows, plain_rows(plain, tables, sparse))
    collection.close()


@pytest.mark.parametrize("policy", ["resident", *MAKERS])
@pytest.mark.parametrize("size", [1, 3])
def test_tiny_batches_and_batches_without_ids(policy: str, size: int, tmp_path: Path) -> None:
    tables = SEQUENCES.tables("rowwise_adagrad")
    collection = ResidentCollection(tables, CPU) if policy == "resident" else tiers(tables, policy, tmp_path)
    none = KeyedJaggedTensor(
        list(FEATURES),
        torch.empty(0, dtype=torch.int64),
        weights=torch.empty(0),
        lengths=torch.zeros(len(FEATURES) * size, dtype=torch.int64),
    )
    stream = [none, *batches(6, size), none, *batches(2, size, seed=9)]
    train(collection, SEQUENCES, stream)
    assert difference(dump(collection), trained_plainly(SEQUENCES, "rowwise_adagrad", stream)) <= 1e-5
    collection.close()


@pytest.mark.parametrize("policy", MAKERS)
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_tiers_leave_the_bits_of_resident_rows(policy: str, optimizer: str, tmp_path: Path) -> None:
    """Each id is a bag of its own in both, and a row's gradients are added in the order of the ids."""
    tables = SEQUENCES.tables(optimizer)
    whole, tiered = ResidentCollection(tables, CPU), tiers(tables, policy, tmp_path)
    for collection in (whole, tiered):
        train(collection, SEQUENCES, batches())
    assert identical(dump(whole), dump(tiered))
    train(whole, SEQUENCES, batches(1))
    assert not identical(dump(whole), dump(tiered)), "a step more is noticed"
    tiered.close()


# -- micro-batches ---------------------------------------------------------------------------


def popular_first(rows: TieredRows) -> tuple[np.ndarray, int]:
    """An order of samples in which those that need no cold row come first, and their number."""
    cold = rows.needs_cold
    return np.concatenate((np.flatnonzero(~cold)[::-1], np.flatnonzero(cold))), int((~cold).sum())


def train_reordered(
    collection: TieredEmbeddingBagCollection,
    stream: list[KeyedJaggedTensor],
    check: Callable[[TieredRows, torch.Tensor, torch.Tensor, KeyedJaggedTensor], None],
    ordered: Callable[[KeyedJaggedTensor, np.ndarray], KeyedJaggedTensor] = select,
) -> int:
    """Train every batch popular samples first; how many of them had samples of both kinds."""
    parted = 0
    for sparse in stream:
        rows = collection.input_dist(sparse)
        order, cold_first = popular_first(rows)
        parted += 0 < cold_first < len(order)
        rows.arrange(order, cold_first)
        collection.advance(rows)
        warm = None if rows.plan.fetches_residents else collection.compute(rows, True, False)[0]
        collection.wait()
        warm = collection.compute(rows, True, False)[0] if warm is None else warm
        cold = collection.compute(rows, False, True)[1]
        assert warm is not None
        cold = torch.zeros_like(warm) if cold is None else cold
        check(rows, warm.detach(), cold.detach(), select(sparse, order))
        LOSS(warm + cold, ordered(sparse, order)).backward()
    return parted


@pytest.mark.parametrize(("policy", "slots"), [("lru", 60), ("lfu", 120), ("hot", 230)])
def test_samples_in_another_order_are_trained_alike(policy: str, slots: int, tmp_path: Path) -> None:
    """The slab has rows of no popular sample, and the ids' rows come in the samples' order."""
    tables = SEQUENCES.tables("rowwise_adagrad")
    collection = tiers(tables, policy, tmp_path, slots=slots)
    same = ResidentCollection(tables, CPU)

    def check(rows: TieredRows, warm: torch.Tensor, cold: torch.Tensor, sparse: KeyedJaggedTensor) -> None:
        with torch.no_grad():
            torch.testing.assert_close(warm + cold, same.lookup(sparse), rtol=1e-5, atol=1e-6)
        samples = torch.arange(sparse.stride()).repeat(len(FEATURES)).repeat_interleave(sparse.lengths())
        assert not cold[samples < rows.cold_first].any()
        assert (warm.any(1) & cold.any(1)).sum() == 0, "an id's row is in one tier"
        LOSS(same.lookup(sparse), sparse).backward()

    assert train_reordered(collection, batches(), check) > 2
    left = dump(collection)
    assert difference(left, dump(same)) <= 1e-6
    assert difference(left, expected(SEQUENCES, "rowwise_adagrad")) <= 1e-5
    collection.close()


def test_a_gradient_in_the_batchs_own_order_is_noticed(tmp_path: Path) -> None:
    collection = tiers(SEQUENCES.tables("sgd"), "lfu", tmp_path)
    train_reordered(collection, batches(), lambda *_: None, ordered=lambda sparse, order: sparse)
    assert difference(dump(collection), expected(SEQUENCES, "sgd")) > 0.05
    collection.close()


# -- negative controls -----------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["resident", "lru"])
def test_an_update_for_each_feature_is_noticed(policy: str, tmp_path: Path) -> None:
    tables = SEQUENCES.tables("rowwise_adagrad")
    collection = ResidentCollection(tables, CPU) if policy == "resident" else tiers(tables, policy, tmp_path)
    train(collection, SEQUENCES, one_feature_at_a_time(batches()))
    assert difference(dump(collection), expected(SEQUENCES, "rowwise_adagrad")) > 1e-3
    collection.close()


def test_a_row_that_is_not_written_back_is_noticed(tmp_path: Path) -> None:
    """Rows of the slab that pass to no slot and not into the store have lost their update."""
    collection = tiers(SEQUENCES.tables("sgd"), "lru", tmp_path)
    collection.cold.write = lambda *_: None  # type: ignore[method-assign]
    train_ahead(collection, SEQUENCES, batches())
    assert difference(dump(collection), expected(SEQUENCES, "sgd")) > 0.01


def test_the_reference_is_trained() -> None:
    first = {n: w.detach().numpy() for n, w in weights_of(plain_module(SEQUENCES.tables("sgd"))).items()}
    assert all(np.abs(expected(SEQUENCES, "sgd")[name] - first[name]).max() > 0.1 for name in first)
    assert all(sparse.stride() == SIZE for sparse in batches())
