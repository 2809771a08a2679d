"""First values of the tables, the optimizer's settings, and the regions they are copied in."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from torch import nn

from recpipe.common.validation import typed
from recpipe.errors import UserError
from recpipe.plugin.tables import FILL_ROWS, SparseFeature, TableOptimizer, TableSet, row_chunks
from recpipe.private_api import module_name
from recpipe.tables.resident import ResidentCollection
from tests.tables.samples import CPU, table_set

FEATURES = (SparseFeature("one", 1), SparseFeature("big", 2 * FILL_ROWS + 7))
LARGE = TableSet.one_each(FEATURES, 4, TableOptimizer("adagrad", 0.1), 11)


def test_fill_does_not_depend_on_chunks() -> None:
    rows = FEATURES[1].rows
    whole = LARGE.fill("big", 0, rows)
    cuts = [0, 1, 100, FILL_ROWS - 1, FILL_ROWS, FILL_ROWS + 3, 2 * FILL_ROWS + 2, rows]
    parts = [LARGE.fill("big", low, high) for low, high in pairwise(cuts)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    np.testing.assert_array_equal(
        LARGE.fill("big", FILL_ROWS - 5, FILL_ROWS + 5), whole[FILL_ROWS - 5 :][:10]
    )


def test_fill_depends_on_seed_table_and_chunk() -> None:
    def first(seed: int, table: str, start: int = 0) -> np.ndarray:
        return TableSet.one_each(FEATURES, 4, LARGE.optimizer, seed).fill(table, start, start + 1)

    rows = [first(1, "big"), first(2, "big"), first(1, "big", FILL_ROWS), first(1, "big", 1)]
    assert len({row.tobytes() for row in rows}) == len(rows)
    np.testing.assert_array_equal(first(1, "big"), first(1, "big"))
    scale = FEATURES[1].rows ** 0.5
    assert not np.allclose(first(1, "one"), first(1, "big") * scale, rtol=1e-3)


def test_fill_is_uniform_within_its_bound_and_state_is_zero() -> None:
    rows = FEATURES[1].rows
    records = LARGE.fill("big", 0, rows)
    weights, state = records[:, :4], records[:, 4:]
    bound = (1 / rows) ** 0.5
    assert records.dtype == np.float32
    assert records.shape == (rows, 8)
    assert np.abs(weights).max() <= bound * (1 + 1e-6)
    assert np.abs(weights).max() > 0.999 * bound
    assert abs(weights.mean()) < 0.01 * bound
    assert abs(weights.std() - bound / 3**0.5) < 0.01 * bound
    assert not state.any()


@pytest.mark.parametrize(("name", "width"), [("sgd", 0), ("rowwise_adagrad", 1), ("adagrad", 8)])
def test_record_width(name: str, width: int) -> None:
    tables = table_set(name)
    assert tables.layout.width == 8 + width
    assert tables.record_bytes == 4 * (8 + width)
    assert tables.total_bytes == 700 * tables.record_bytes
    assert tables.shapes()["b"] == (600, 8, width)


@pytest.mark.parametrize(
    ("name", "lr", "eps", "words"),
    [
        ("adamax", 0.1, 1e-8, "adamax is unknown"),
        ("sgd", -0.1, 1e-8, "lr=-0.1"),
        ("adagrad", 0.1, 0.0, "eps=0.0"),
    ],
)
def test_bad_optimizers_are_refused(name: str, lr: float, eps: float, words: str) -> None:
    with pytest.raises(UserError, match=words):
        typed(TableOptimizer, {"name": name, "lr": lr, "eps": eps}, "optim.tables")


NAMES = [
    "user_1",
    "a.b",
    "a%2Eb",
    "a%252Eb",
    "a b",
    "a/b",
    "..",
    "",
    "%",
    "keys",
    "%6Beys",
    "type",
    "é中",
    "'\"",
]


def test_any_table_name_has_a_module_name_of_its_own() -> None:
    modules = nn.ModuleDict({module_name(name): nn.Identity() for name in NAMES})
    assert len(modules) == len(NAMES)
    assert module_name("user_1") == "user_1", "TorchRec's messages name the table as the user does"


def test_chunks_cover_every_row_once() -> None:
    regions = row_chunks(LARGE)
    covered = [(r.table, row) for r in regions for row in range(r.start, r.stop)]
    assert len(covered) == len(set(covered)) == LARGE.layout.total_rows
    assert {(r.left, r.right) for r in regions} == {(0, 4)}


def test_resident_collection_starts_as_filled() -> None:
    tables = table_set("adagrad")
    collection = ResidentCollection(tables, CPU)
    for region in collection.regions():
        weights, state = collection.read(region)
        expected = tables.fill(region.table, region.start, region.stop)
        np.testing.assert_array_equal(np.concatenate((weights, state), axis=1), expected)


def test_resident_collection_writes_weights_and_state() -> None:
    collection = ResidentCollection(table_set("rowwise_adagrad"), CPU)
    region = next(r for r in collection.regions() if r.table == "b")
    weights, state = (np.random.default_rng(0).random(v.shape, np.float32) for v in collection.read(region))
    collection.write(region, (weights, state))
    read = collection.read(region)
    np.testing.assert_array_equal(read[0], weights)
    np.testing.assert_array_equal(read[1], state)
