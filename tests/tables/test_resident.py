"""Resident tables in one TBE or several: the same bits, and room for the dense vector."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torchrec.modules.embedding_configs import DataType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe import private_api
from recpipe.tables.build import tbe_count
from recpipe.tables.config import TierConfig
from recpipe.tables.resident import ResidentCollection
from tests.tables.samples import CPU, FEATURES, dump, identical, table_set

NAMES = [f.name for f in FEATURES]
BATCH = 11


def ids(seed: int) -> KeyedJaggedTensor:
    """Bags of 0 to 4 ids."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 5, (len(NAMES) * BATCH,), generator=random)
    values = [
        torch.randint(0, f.rows, (int(n),), generator=random)
        for f, n in zip(FEATURES, lengths.view(len(NAMES), BATCH).sum(1), strict=True)
    ]
    return KeyedJaggedTensor(NAMES, torch.cat(values), lengths=lengths)


def trained(groups: int, steps: int = 6) -> ResidentCollection:
    made = ResidentCollection(table_set("rowwise_adagrad"), CPU, groups)
    for seed in range(steps):
        pooled = made(ids(seed)).values()
        pooled.backward(torch.sin(torch.arange(pooled.numel(), dtype=torch.float32)).view_as(pooled))
    return made


@pytest.mark.parametrize("groups", [2, len(FEATURES)])
def test_several_tbes_are_bitwise_one(groups) -> None:
    one, several = trained(1), trained(groups)
    assert len(several.tbes) == groups
    assert identical(dump(one), dump(several))
    with torch.no_grad():
        assert torch.equal(one(ids(99)).values(), several(ids(99)).values())
    several.close()


def test_a_table_that_is_not_updated_is_noticed() -> None:
    one, several = trained(1), trained(2, steps=5)
    assert not identical(dump(one), dump(several))
    several.close()


def test_padding_is_empty_and_in_front() -> None:
    made = trained(1)
    rows = made.input_dist(ids(7))
    rows.wants_padding = True
    wide, _ = made.compute(rows, True, True)
    assert rows.padding == made.tables.dim
    assert wide.shape == (BATCH, (1 + len(FEATURES)) * made.tables.dim)
    assert not wide[:, : made.tables.dim].any()
    assert torch.equal(wide[:, made.tables.dim :], made(ids(7)).values())


def test_several_tbes_have_no_padding() -> None:
    made = ResidentCollection(table_set(), CPU, 2)
    rows = made.input_dist(ids(7))
    rows.wants_padding = True
    found, _ = made.compute(rows, True, True)
    assert rows.padding == 0
    assert found.shape == (BATCH, len(FEATURES) * made.tables.dim)
    made.close()


def test_features_in_another_order_find_their_tables() -> None:
    made, sparse = trained(1), ids(3)
    shuffled = sparse.permute(list(reversed(range(len(NAMES)))))
    assert torch.equal(made(sparse).values(), made(shuffled).values())


@pytest.mark.parametrize("storage", [DataType.FP32, DataType.FP16])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
def test_rows_looked_up_without_gradients_have_the_same_bits(
    optimizer: str, weighted: bool, storage: DataType, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ResidentCollection(replace(table_set(optimizer), weighted=weighted, storage=storage), CPU)
    taken = []
    short = private_api.look_up_only
    monkeypatch.setattr(private_api, "look_up_only", lambda *given: taken.append(0) or short(*given))
    empty = KeyedJaggedTensor(
        NAMES, torch.empty(0, dtype=torch.int64), lengths=torch.empty(0, dtype=torch.int64)
    )
    for number, sparse in enumerate((ids(5), empty)):
        weights = torch.rand(len(sparse.values()))
        given = KeyedJaggedTensor(NAMES, sparse.values(), weights if weighted else None, sparse.lengths())
        expected = made.lookup(given)
        assert len(taken) == number, "a lookup that is trained is the TBE's own"
        with torch.no_grad():
            found = made.lookup(given)
        assert found.equal(expected)
        assert not found.requires_grad
    assert len(taken) == 2


def test_a_row_for_each_id_is_the_tbes_own_without_gradients_too() -> None:
    made, sparse = ResidentCollection(replace(table_set(), pooled=False), CPU), ids(5)
    with torch.no_grad():
        assert made.lookup(sparse).equal(made.records_of(rows_of(made, sparse))[:, : made.tables.dim])


def rows_of(made: ResidentCollection, sparse: KeyedJaggedTensor) -> np.ndarray:
    """Rows of the ids, numbered over all tables."""
    bases = made.tables.layout.bases[made.tables.table_of]
    return sparse.values().numpy() + np.repeat(bases, sparse.length_per_key())


def test_how_many_tbes() -> None:
    def count(asked: object, ids_per_bag: float, device: str = "cpu") -> int:
        config = TierConfig("resident", "host", "25%", None, True, False, tbes=asked)
        return tbe_count(config, table_set(), lambda: ids_per_bag, torch.device(device))

    threads = min(torch.get_num_threads(), len(FEATURES))
    assert count("auto", 1.0) == 1
    assert count("auto", 20.0) == threads
    assert count("auto", 20.0, "cuda") == 1
    assert count(2, 1.0) == 2
    assert count(100, 1.0) == len(FEATURES)
