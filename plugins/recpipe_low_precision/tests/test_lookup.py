"""``LowPrecisionBags`` gives what an ``EmbeddingBagCollection`` of the decoded rows gives."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from recpipe_low_precision.bags import LowPrecisionBags, RowType
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.answers.row_types import ROW_TYPES, decode_rows, encode_rows
from recpipe.errors import DataError, UserError

ROWS = {"t0": 30, "t1": 20, "t2": 25, "t3": 10, "t4": 40}
KINDS = dict(zip(ROWS, ROW_TYPES, strict=True))
BATCH = 6


def configs(*pooling: PoolingType, shared: bool = False) -> list[EmbeddingBagConfig]:
    """One table of each type; every second one of another dimension."""
    ways = [pooling[i % len(pooling)] for i in range(len(ROWS))]
    return [
        EmbeddingBagConfig(
            name=name,
            embedding_dim=16 if i % 2 else 8,
            num_embeddings=rows,
            feature_names=[f"f{i}", "extra"] if shared and name == "t2" else [f"f{i}"],
            pooling=ways[i],
        )
        for i, (name, rows) in enumerate(ROWS.items())
    ]


def pair(
    tables: Sequence[EmbeddingBagConfig], weighted: bool = False
) -> tuple[LowPrecisionBags, EmbeddingBagCollection]:
    """Low precision, and float tables of the same decoded rows."""
    draw = torch.Generator().manual_seed(5)
    floats = EmbeddingBagCollection(list(tables), is_weighted=weighted)
    bags = LowPrecisionBags.of(floats, {name: RowType(kind) for name, kind in KINDS.items()})
    for config in tables:
        rows = encode_rows(
            torch.randn(config.num_embeddings, config.embedding_dim, generator=draw), KINDS[config.name]
        )
        bags.rows_of(config.name).copy_(rows)
        decoded = decode_rows(rows, KINDS[config.name], config.embedding_dim)
        floats.embedding_bags[config.name].weight.data.copy_(decoded)
    return bags, floats


def batch(tables: Sequence[EmbeddingBagConfig], weighted: bool = False) -> KeyedJaggedTensor:
    """Bags of 0 to 4 ids, the features in another order than the tables', and one that no table has."""
    draw = torch.Generator().manual_seed(8)
    names = [(f, c.num_embeddings) for c in reversed(list(tables)) for f in c.feature_names]
    names.insert(1, ("unused", 5))
    lengths = torch.randint(0, 5, (len(names) * BATCH,), generator=draw)
    per = lengths.view(len(names), BATCH).sum(1).tolist()
    ids = torch.cat(
        [torch.randint(0, rows, (n,), generator=draw) for (_, rows), n in zip(names, per, strict=True)]
    )
    weights = torch.rand(len(ids), generator=draw) if weighted else None
    return KeyedJaggedTensor([f for f, _ in names], ids, weights, lengths)


CASES = {
    "sum": ((PoolingType.SUM,), False, False),
    "mean": ((PoolingType.MEAN,), False, False),
    "sum and mean": ((PoolingType.MEAN, PoolingType.SUM), False, False),
    "weighted": ((PoolingType.SUM,), True, False),
    "two features of a table": ((PoolingType.SUM,), False, True),
}


@pytest.mark.parametrize(("pooling", "weighted", "shared"), CASES.values(), ids=list(CASES))
def test_equals_lookups_of_the_decoded_rows(pooling, weighted: bool, shared: bool) -> None:
    tables = configs(*pooling, shared=shared)
    bags, floats = pair(tables, weighted)
    features = batch(tables, weighted)
    with torch.no_grad():
        found, expected = bags(features), floats(features)
    assert found.keys() == expected.keys()
    assert found.length_per_key() == expected.length_per_key()
    torch.testing.assert_close(found.values(), expected.values(), rtol=1e-5, atol=1e-6)


def test_ids_of_int32_give_the_same_bits() -> None:
    tables = configs(PoolingType.SUM)
    bags, _ = pair(tables)
    features = batch(tables)
    short = KeyedJaggedTensor(features.keys(), features.values().int(), None, features.lengths().int())
    assert torch.equal(bags(short).values(), bags(features).values())


@pytest.mark.parametrize("bad", [-1, 20])
def test_an_id_that_is_not_in_its_table_is_named(bad: int) -> None:
    tables = configs(PoolingType.SUM)
    bags, _ = pair(tables)
    features = batch(tables)
    start = features.offset_per_key()[features.keys().index("f1")]
    features.values()[start] = bad
    with pytest.raises(DataError, match=f"id {bad} of feature f1 is not in its table of 20 rows"):
        bags(features)


def test_a_feature_that_the_batch_lacks_is_named() -> None:
    tables = configs(PoolingType.SUM)
    bags, _ = pair(tables)
    with pytest.raises(UserError, match="no feature 'f4'"):
        bags(batch(tables[:4]))


@pytest.mark.parametrize("kind", ROW_TYPES)
def test_a_pruned_row_adds_nothing(kind: str) -> None:
    config = EmbeddingBagConfig(name="t", embedding_dim=16, num_embeddings=12, feature_names=["f"])
    values = torch.randn(12, 16, generator=torch.Generator().manual_seed(1))
    kept = torch.arange(12) % 3 != 0
    bags = LowPrecisionBags([config], {"t": RowType(kind, int(kept.sum()))})
    bags.rows_of("t").copy_(encode_rows(values[kept], kind))
    bags.places_of("t").copy_(torch.where(kept, kept.cumsum(0) - 1, -1))
    features = KeyedJaggedTensor(["f"], torch.tensor([0, 4, 3, 1, 2, 11]), None, torch.tensor([1, 2, 3]))
    decoded = decode_rows(encode_rows(values, kind), kind, 16) * kept[:, None]
    expected = torch.stack((decoded[0], decoded[4] + decoded[3], decoded[[1, 2, 11]].sum(0)))
    torch.testing.assert_close(bags(features).values(), expected)
    assert not expected[0].any()
    assert expected[1].any()


def test_pruned_and_whole_tables_stand_beside_each_other() -> None:
    tables = configs(PoolingType.SUM)[:2]
    bags = LowPrecisionBags(tables, {"t0": RowType("int8", 1), "t1": RowType("fp32")})
    bags.rows_of("t0").copy_(encode_rows(torch.ones(1, 8), "int8"))
    bags.places_of("t0").fill_(-1)
    bags.places_of("t0")[5] = 0
    assert not len(bags.places_of("t1"))
    values = torch.arange(20.0).repeat_interleave(16).view(20, 16)
    bags.rows_of("t1").copy_(encode_rows(values, "fp32"))
    features = KeyedJaggedTensor(
        ["f0", "f1"], torch.tensor([5, 6, 3, 4]), None, torch.ones(4, dtype=torch.long)
    )
    found = bags(features).values()
    assert torch.equal(found[:, :8], torch.tensor([[1.0], [0.0]]).expand(2, 8))
    assert torch.equal(found[:, 8:], values[[3, 4]])


def test_weighted_means_are_refused() -> None:
    tables = configs(PoolingType.MEAN)
    with pytest.raises(UserError, match="weighted pooling"):
        LowPrecisionBags(tables, {name: RowType(kind) for name, kind in KINDS.items()}, is_weighted=True)
