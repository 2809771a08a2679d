"""Tables of a model in groups: names, places, numbers, first values; what cannot be placed is refused."""

from __future__ import annotations

import copy
import itertools
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.errors import UserError
from recpipe.pipeline.placed import put_proxies
from recpipe.plugin.tables import FILL_ROWS, Table, TableOptimizer, TableSet
from recpipe.tables.grouped import GroupedCollection
from recpipe.tables.groups import ModelTables, collections_of, group_tables
from recpipe.tables.inputs import Inputs
from recpipe.tables.resident import ResidentCollection
from recpipe.tables.stores.local import HostStore
from tests.tables.grouped import META, ROWS, ROWWISE, SGD, Model, ids, model_tables, optimizer_of
from tests.tables.samples import CPU, dump

CHUNKS = (0, 3, 11, 12)


def test_tables_of_one_collection_dimension_and_optimizer_are_a_group() -> None:
    groups = model_tables().groups
    assert [(g.path, g.tables.dim, g.tables.optimizer) for g in groups] == [
        ("user", 8, ROWWISE),
        ("user", 4, ROWWISE),
        ("user", 8, SGD),
        ("item.bags", 8, ROWWISE),
        ("history", 8, ROWWISE),
    ]
    assert [g.tables.layout.tables for g in groups] == [
        ("user.goods",),
        ("few",),
        ("seen",),
        ("item.bags.goods",),
        ("shops",),
    ]
    assert [g.places for g in groups] == [(0, 1), (2,), (3,), (0,), (0, 1)]
    assert [g.tables.pooled for g in groups] == [True, True, True, True, False]
    assert next(dict(g.own_names) for g in groups) == {"user.goods": "goods"}
    tables = model_tables()
    rows = [t.rows for t in tables.tables]
    assert tables.bases.tolist() == [0, *np.cumsum(rows)]
    assert tables.total_bytes == 4 * (300 * 9 + 12 * 5 + 150 * 8 + 500 * 9 + 90 * 9)
    assert sum(tables.bytes_of_tables().values()) == tables.total_bytes


def test_lookups_have_the_numbers_of_all_rows() -> None:
    tables, sparse = model_tables(), ids(8, seed=1)
    bags = Inputs(tables, [[("ids",)]] * len(tables.groups)).lookups({"ids": sparse})
    expected = []
    for group, base in zip(tables.groups, tables.bases[:-1], strict=True):
        for name in group.tables.features:
            expected += (sparse[name].values() + int(base)).tolist()
    assert bags.rows.tolist() == expected
    assert bags.batch_size == 8
    assert len(bags.offsets) == 8 * len(ROWS) + 1
    assert np.diff(bags.offsets).sum() == len(expected)


# -- first values ----------------------------------------------------------------------------


def first_weights(tables: ModelTables) -> dict[str, np.ndarray]:
    return {
        t.name: g.tables.fill(t.name, 0, t.rows)[:, : g.tables.dim]
        for g in tables.groups
        for t in g.tables.tables
    }


def test_a_model_with_values_keeps_them() -> None:
    torch.manual_seed(5)
    model = Model(CPU)
    found = first_weights(model_tables(model))
    for name, parameter in model.named_parameters():
        own = {"user.embedding_bags.goods.weight": "user.goods"}
        own |= {"item.bags.embedding_bags.goods.weight": "item.bags.goods"}
        table = own.get(name, name.split(".")[-2])
        np.testing.assert_array_equal(found[table], parameter.detach().numpy())


def test_the_usual_values_are_made_in_parts_and_differ_from_table_to_table() -> None:
    tables = model_tables()
    assert all(table.drawn_from for table in tables.tables), "no table is ever whole in memory"
    found = first_weights(tables)
    for group in tables.groups:
        for table in group.tables.tables:
            bound = (1 / table.rows) ** 0.5
            assert 0.9 * bound < np.abs(found[table.name]).max() <= bound * (1 + 1e-6)
    one, other = found["user.goods"] * 300**0.5, found["item.bags.goods"] * 500**0.5
    assert not np.allclose(one, other[:300], atol=1e-3)
    again, others = first_weights(model_tables()), first_weights(model_tables(seed=4))
    for name, values in found.items():
        np.testing.assert_array_equal(values, again[name])
        assert not np.array_equal(values, others[name])


INITIALISERS = {
    "ones": nn.init.ones_,
    "normal": partial(nn.init.normal_, mean=3.0, std=0.1),
    "uniform": partial(nn.init.uniform_, a=0.5, b=0.75),
    "orthogonal": nn.init.orthogonal_,
}


@pytest.mark.parametrize("init", INITIALISERS)
def test_initialisers_of_tables_on_the_meta_device_are_carried_out(init: str) -> None:
    """Whole tables, in whatever parts they are asked for; the process's own random numbers go on."""
    tables = model_tables(Model(META, INITIALISERS[init]))
    torch.manual_seed(11)
    state = torch.get_rng_state()
    found = first_weights(tables)
    assert torch.equal(torch.get_rng_state(), state)
    few = next(g.tables for g in tables.groups if g.tables.layout.tables == ("few",))
    parts = [few.fill("few", low, high)[:, :4] for low, high in itertools.pairwise(CHUNKS)]
    np.testing.assert_array_equal(np.concatenate(parts), found["few"])
    np.testing.assert_array_equal(few.fill("few", 5, 9)[:, :4], found["few"][5:9])
    for values in found.values():
        if init == "ones":
            assert (values == 1).all()
        elif init == "normal":
            assert abs(values.mean() - 3) < 0.05
            assert 0.05 < values.std() < 0.15
        elif init == "uniform":
            assert values.min() >= 0.5
            assert values.max() <= 0.75
        else:
            np.testing.assert_allclose(values.T @ values, np.eye(values.shape[1]), atol=1e-5)


def test_tables_of_one_name_and_initialiser_have_values_of_their_own() -> None:
    found = first_weights(model_tables(Model(META, nn.init.normal_)))
    one, other = found["user.goods"], found["item.bags.goods"]
    assert not np.array_equal(one, other[: len(one)])
    seeds = [first_weights(model_tables(Model(META, nn.init.normal_), seed))["seen"] for seed in (3, 3, 4)]
    np.testing.assert_array_equal(seeds[0], seeds[1])
    assert not np.array_equal(seeds[0], seeds[2])


def test_bounds_that_a_config_names_are_kept() -> None:
    bounded = EmbeddingBagConfig(
        name="t",
        embedding_dim=4,
        num_embeddings=50,
        feature_names=["f"],
        weight_init_min=2.0,
        weight_init_max=2.5,
    )
    holder = nn.ModuleDict({"bags": EmbeddingBagCollection([bounded], device=META)})
    values = first_weights(group_tables(collections_of(holder), optimizer_of, 1))["t"]
    assert values.min() >= 2
    assert values.max() <= 2.5


@pytest.mark.parametrize("rows", [40, FILL_ROWS + 5])
def test_first_values_of_a_table_reach_memory_and_stores(rows: int) -> None:
    """In parts, each row once; the optimizer's state begins at zero."""
    asked: list[tuple[int, int]] = []

    def first(start: int, stop: int) -> np.ndarray:
        asked.append((start, stop))
        return np.arange(start, stop, dtype=np.float32)[:, None].repeat(4, 1)

    tables = TableSet(
        (Table("plain", 7, ("p",)), Table("given", rows, ("g",), first)), 4, TableOptimizer("adagrad", 0.1), 1
    )
    found = dump(ResidentCollection(tables, CPU))
    expected = np.arange(rows, dtype=np.float32)
    assert asked == [(low, min(low + FILL_ROWS, rows)) for low in range(0, rows, FILL_ROWS)]
    np.testing.assert_array_equal(found["given"][:, :4], expected[:, None].repeat(4, 1))
    assert not found["given"][:, 4:].any()
    usual = TableSet((Table("plain", 7, ("p",)),), 4, TableOptimizer("adagrad", 0.1), 1)
    np.testing.assert_array_equal(found["plain"], usual.fill("plain", 0, 7))
    store = HostStore(tables.layout, tables.fill)
    out = np.empty((rows, 8), np.float32)
    store.gather(7 + np.arange(rows), out)
    np.testing.assert_array_equal(out, found["given"])


# -- names -----------------------------------------------------------------------------------


def one_table(**more: object) -> nn.Module:
    settings = {"name": "t", "embedding_dim": 8, "num_embeddings": 5, "feature_names": ["f"]} | more
    return nn.ModuleDict({"bags": EmbeddingBagCollection([EmbeddingBagConfig(**settings)], device=META)})


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Linear(2, 2), "Linear holds no EmbeddingBagCollection and no EmbeddingCollection of TorchRec's"),
        (one_table(embedding_dim=6), "table 't' of 'bags' has embedding_dim=6.*a multiple of 4"),
        (one_table(data_type=DataType.FP16), "table 't' of 'bags' is stored as FP16.*leave data_type out"),
    ],
)
def test_what_cannot_be_placed_is_refused(model: nn.Module, words: str) -> None:
    with pytest.raises(UserError, match=words):
        group_tables(collections_of(model), optimizer_of, 1)


def test_a_table_may_have_the_name_of_its_feature_though_no_module_can() -> None:
    tables = group_tables(
        collections_of(one_table(name="user%2Eid", feature_names=["user.id"])), optimizer_of, 1
    )
    assert [t.name for t in tables.tables] == ["user.id"]
    kept = group_tables(collections_of(one_table(name="user%2Eid", feature_names=["other"])), optimizer_of, 1)
    assert [t.name for t in kept.tables] == ["user%2Eid"]


# -- proxies over groups ----------------------------------------------------------------------


def test_proxies_give_what_the_collections_gave() -> None:
    """Of every group, in the collection's own order, also where means and dimensions differ."""
    torch.manual_seed(5)
    model = Model(CPU)
    plain, sparse = copy.deepcopy(model), ids(16, seed=2)
    tables = model_tables(model)
    grouped = GroupedCollection(tables, [ResidentCollection(g.tables, CPU) for g in tables.groups])
    proxies = put_proxies(model, tables, grouped)
    assert model.item["bags"] is proxies["item.bags"]
    with torch.no_grad():
        for mine, theirs in ((model.user, plain.user), (model.item["bags"], plain.item["bags"])):
            found, expected = mine(sparse), theirs(sparse)
            assert found.keys() == expected.keys()
            torch.testing.assert_close(found.values(), expected.values(), rtol=1e-6, atol=1e-7)
        found, expected = model.history(sparse), plain.history(sparse)
        assert found.keys() == expected.keys()
        for name, rows in expected.items():
            assert torch.equal(found[name].values(), rows.values())
            assert torch.equal(found[name].lengths(), rows.lengths())
    state, theirs = model.state_dict(), plain.state_dict()
    assert state.keys() == theirs.keys()
    assert all(torch.equal(state[name], value) for name, value in theirs.items())


def test_a_feature_that_two_tables_look_up() -> None:
    """One id, a row of each; TorchRec then names what comes out by feature and table."""
    torch.manual_seed(5)

    def table(name: str, dim: int, *features: str) -> EmbeddingBagConfig:
        return EmbeddingBagConfig(
            name=name, embedding_dim=dim, num_embeddings=30, feature_names=list(features)
        )

    tables = [table("a", 8, "f", "g"), table("b", 8, "f"), table("c", 4, "f", "g")]
    model = nn.ModuleDict({"bags": EmbeddingBagCollection(tables)})
    plain = copy.deepcopy(model)
    groups = group_tables(collections_of(model), optimizer_of, 1)
    grouped = GroupedCollection(groups, [ResidentCollection(g.tables, CPU) for g in groups.groups])
    put_proxies(model, groups, grouped)
    lengths = torch.tensor([2, 0, 1, 3, 1, 1])
    sparse = KeyedJaggedTensor(["g", "f"], torch.randint(0, 30, (8,)), lengths=lengths)
    with torch.no_grad():
        found, expected = model["bags"](sparse), plain["bags"](sparse)
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found.values(), expected.values(), rtol=1e-6, atol=1e-7)
