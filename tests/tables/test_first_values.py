"""What first weights are drawn from: by block and row from the table's seed, wherever its rows are."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from recpipe.plugin.first_values import Drawn, Normal, Uniform
from recpipe.plugin.tables import FILL_ROWS, Table, TableOptimizer, TableSet
from recpipe.private_api import LocalPart
from recpipe.tables.groups import collections_of, group_tables
from recpipe.tables.resident import ResidentCollection
from recpipe.tables.sharding.own import local_tables
from recpipe.tables.stores import make_store
from tests.tables.samples import CPU, dump, tiers

ROWS = FILL_ROWS + 40
OPTIMIZER = TableOptimizer("adagrad", 0.1)
DRAWN = {"uniform": Uniform(-0.02, 0.06), "normal": Normal(0.5, 0.01)}


def tables_of(drawn: Drawn | None, rows: int = ROWS, seed: int = 3) -> TableSet:
    return TableSet((Table("usual", 7, ("u",)), Table("drawn", rows, ("d",), drawn)), 4, OPTIMIZER, seed)


def weights(tables: TableSet, start: int = 0, stop: int = ROWS) -> np.ndarray:
    return tables.fill("drawn", start, stop)[:, :4]


@pytest.mark.parametrize("kind", DRAWN)
def test_blocks_are_parts_of_the_whole(kind: str) -> None:
    tables = tables_of(DRAWN[kind])
    whole = weights(tables)
    cuts = [0, 1, FILL_ROWS - 3, FILL_ROWS, FILL_ROWS + 9, ROWS]
    np.testing.assert_array_equal(np.concatenate([weights(tables, *cut) for cut in pairwise(cuts)]), whole)
    for other in (tables_of(DRAWN[kind], seed=4), replace(tables, numbers=(0, 5))):
        assert not np.isclose(weights(other, 0, 50), whole[:50], rtol=1e-6).any()
    assert len(np.unique(whole[:, 0])) > 0.9 * ROWS, "blocks differ from each other"


def test_values_have_the_distribution() -> None:
    low, normal = weights(tables_of(DRAWN["uniform"])), weights(tables_of(DRAWN["normal"]))
    assert low.min() >= -0.02
    assert low.max() <= 0.06
    assert abs(low.mean() - 0.02) < 3e-4
    assert abs(low.std() - 0.08 / 12**0.5) < 3e-4
    assert abs(normal.mean() - 0.5) < 1e-4
    assert abs(normal.std() - 0.01) < 1e-4
    assert abs(((normal - 0.5) ** 4).mean() / 0.01**4 - 3) < 0.1, "a normal distribution's fourth moment"


def test_rows_that_grow_have_the_distribution() -> None:
    """Of numbers of their own; the usual values are as they always were."""
    numbers = np.random.default_rng(0).random((40_000, 8), np.float32) * 2 - 1

    def of(drawn: Drawn) -> np.ndarray:
        return drawn.made_of(lambda columns: numbers[:, :columns], 4)

    assert of(DRAWN["uniform"]).min() >= -0.02
    assert of(DRAWN["uniform"]).max() <= 0.06
    assert abs(of(DRAWN["normal"]).mean() - 0.5) < 2e-4
    assert abs(of(DRAWN["normal"]).std() - 0.01) < 2e-4
    assert abs(((of(DRAWN["normal"]) - 0.5) ** 4).mean() / 0.01**4 - 3) < 0.1
    assert np.isfinite(Normal(0, 1).made_of(lambda columns: np.full((1, columns), -1, np.float32), 4)).all()
    np.testing.assert_array_equal(of(Uniform.usual(50)), numbers[:, :4] * np.float32(np.sqrt(1 / 50)))


@pytest.mark.parametrize("kind", DRAWN)
def test_rows_are_the_same_wherever_they_are(kind: str, tmp_path: Path) -> None:
    """In memory, in stores, behind slots, and in parts of shards; not those of another distribution."""
    tables = tables_of(DRAWN[kind], rows=900)
    expected = {t.name: tables.fill(t.name, 0, t.rows) for t in tables.tables}
    usual = tables_of(None, rows=900)
    assert np.array_equal(usual.fill("usual", 0, 7), expected["usual"])
    assert (
        not np.isclose(usual.fill("drawn", 0, 900)[:, :4], expected["drawn"][:, :4], atol=1e-6).all(1).any()
    )
    every = np.concatenate(list(expected.values()))
    held = [ResidentCollection(tables, CPU), tiers(tables, "lru", tmp_path, slots=100)]
    for found in map(dump, held):
        np.testing.assert_array_equal(np.concatenate(list(found.values())), every)
    for name in ("host", "ssd"):
        store = make_store(name, tables.layout, tables.fill, directory=tmp_path / name)
        out = np.empty_like(every)
        store.gather(np.arange(len(every)), out)
        store.close()
        np.testing.assert_array_equal(out, every)
    part = LocalPart("drawn", row=300, rows=500, column=0, columns=4, features=1)
    shard = local_tables([part], tables)
    np.testing.assert_array_equal(shard.fill(shard.tables[0].name, 0, 500), expected["drawn"][300:800])


HUGE = 4_000_000_000
"""Rows of a table that no memory holds."""


@pytest.mark.parametrize(
    ("said", "drawn"),
    [
        ({}, Uniform.usual(HUGE)),
        ({"weight_init_min": -0.01, "weight_init_max": 0.03}, Uniform(-0.01, 0.03)),
        ({"weight_init_max": 0.5}, Uniform(-((1 / HUGE) ** 0.5), 0.5)),
        ({"init_fn": partial(nn.init.uniform_, b=0.2)}, Uniform(0.0, 0.2)),
        ({"init_fn": partial(nn.init.normal_, std=1e-4)}, Normal(0.0, 1e-4)),
        ({"init_fn": nn.init.normal_}, Normal(0.0, 1.0)),
    ],
)
def test_a_config_says_what_is_drawn_and_no_table_is_ever_whole(said: dict[str, Any], drawn: Drawn) -> None:
    config = EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=HUGE, feature_names=["f"], **said)
    model = nn.ModuleDict({"bags": EmbeddingBagCollection([config], device=torch.device("meta"))})
    tables = group_tables(collections_of(model), lambda name, weight: OPTIMIZER, 1).groups[0].tables
    assert tables.tables[0].drawn_from == drawn
    last = tables.fill("t", HUGE - 3, HUGE)
    assert last.shape == (3, 8)
    assert last[:, :4].all()


@pytest.mark.parametrize(
    "init",
    [nn.init.ones_, partial(nn.init.normal_, generator=None), partial(torch.Tensor.fill_, value=0.5)],
)
def test_any_other_initialiser_sees_the_table(init: Any) -> None:
    config = EmbeddingBagConfig(
        name="t", embedding_dim=4, num_embeddings=20, feature_names=["f"], init_fn=init
    )
    model = nn.ModuleDict({"bags": EmbeddingBagCollection([config], device=torch.device("meta"))})
    (table,) = group_tables(collections_of(model), lambda name, weight: OPTIMIZER, 1).tables
    assert table.drawn_from is None
    assert callable(table.first)
    assert table.first(5, 20).shape == (15, 4)
