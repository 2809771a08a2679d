"""Groups of tables of several collections sharded over real processes against whole tables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from recpipe.checkpoint.table_files import check_tables, load_regions
from recpipe.errors import UserError
from recpipe.plugin.tables import Table, TableSet
from recpipe.report.record import write_json
from recpipe.tables.collection import SavedByRanks
from recpipe.tables.grouped import GroupedCollection
from recpipe.tables.groups import ModelTables
from recpipe.tables.resident import ResidentCollection
from recpipe.tables.sharding.claims import ShardClaims
from recpipe.tables.sharding.plan import Shard, ShardPlan, TablePlan, load_plan
from recpipe.tables.sharding.planning import SEQUENCE_TYPES
from tests.processes import start_ranks
from tests.tables.grouped import SGD, contents
from tests.tables.samples import CPU
from tests.tables.sharded_groups import Case, WeightedModel, model_tables, process, sharding

ROWWISE = ("user.goods", "few", "item.bags.goods", "weighted")
"""Tables with one state for a row, which must not be cut by columns."""
CASES = (
    Case({"*": "row_wise"}),
    Case({"*": "table_wise"}),
    Case({"*": "data_parallel"}),
    Case({"*": "column_wise", **dict.fromkeys(ROWWISE, "row_wise")}),
    Case({"*": "row_wise", "few": "data_parallel", "shops": "table_wise", "weighted": "table_wise"}),
    Case({"*": "row_wise"}, deaf=1),
    Case({"*": "row_wise"}, skips="both"),
    Case({"*": "table_wise"}, skips="both"),
    Case({"*": "data_parallel"}, skips="both"),
    Case({"*": "row_wise"}, skips="alone"),
)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("groups")
    start_ranks(process, (2, str(folder), CASES, 6), 2)
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ranks_train_what_one_process_trains(told, case) -> None:
    """Uneven batches of bags, the last of one sample; weights and optimizer states of all rows."""
    found = json.loads((told / "told.json").read_text())[case.name]
    assert found.keys() == {t.name for t in model_tables(WeightedModel()).tables}
    for name, (kind, difference) in found.items():
        assert kind == case.types.get(name, case.types["*"])
        wrong = case.deaf is not None or case.skips == "alone"
        assert difference > 1e-3 if wrong else difference <= 1e-6, name


def test_one_process_reads_what_ranks_have_saved(told) -> None:
    tables = model_tables(WeightedModel())
    whole = GroupedCollection(tables, [ResidentCollection(g.tables, CPU) for g in tables.groups])
    assert whole.offers(SavedByRanks) is None
    files = check_tables(told / "tables", tables.shapes())
    assert files is not None
    load_regions(files, whole, tables.shapes())
    with np.load(told / "contents.npz") as expected:
        for name, values in contents(whole).items():
            np.testing.assert_array_equal(values, expected[name], err_msg=name)


def test_all_tables_of_a_model_are_planned_together(tmp_path) -> None:
    """No rank has all of the load, though every collection has but a few tables."""
    tables = model_tables(WeightedModel())
    made = sharding(tables, {"*": "table_wise"}, 2).plan(None)
    assert list(made.tables) == [t.name for t in tables.tables]
    assert {n: (t.rows, t.dim) for n, t in made.tables.items()} == {
        n: (rows, dim) for n, (rows, dim, _) in tables.shapes().items()
    }
    loads = [0.0, 0.0]
    for table in made.tables.values():
        loads[table.shards[0].rank] += table.shards[0].predicted_ms or 0.0
    assert min(loads) > 0.5 * max(loads) > 0
    write_json(tmp_path / "plan.json", made.to_dict())
    assert load_plan(tmp_path / "plan.json") == made


def test_a_plan_that_cuts_sequences_unalike_or_by_more_than_torchrec_has_is_refused() -> None:
    tables = (Table("a", 40, ("a",)), Table("b", 40, ("b",)))
    made = ModelTables.single(TableSet(tables, 16, SGD, 3, pooled=False))

    def cut(kind: str, columns: int) -> TablePlan:
        shards = tuple(Shard(0, 0, left, 40, columns) for left in range(0, 16, columns))
        return TablePlan(kind, "fused", 40, 16, (0,) * len(shards), shards)

    alike = sharding(made, {"*": "column_wise"}, 1)
    alike.check(ShardPlan(1, {"a": cut("column_wise", 8), "b": cut("column_wise", 8)}))
    with pytest.raises(UserError, match="tables a, b of one EmbeddingCollection .* parts of 4 and 8 columns"):
        alike.check(ShardPlan(1, {"a": cut("column_wise", 8), "b": cut("column_wise", 4)}))
    by_host = TablePlan("table_row_wise", "fused", 40, 16, (0,), (Shard(0, 0, 0, 40, 16),))
    free = replace(alike, claims=ShardClaims())
    with pytest.raises(UserError, match=r"'b' is table_row_wise, but only .* of an EmbeddingCollection"):
        free.check(ShardPlan(1, {"a": cut("column_wise", 8), "b": by_host}))


@pytest.mark.parametrize("kind", ["table_row_wise", "table_column_wise", "grid_shard"])
def test_what_torchrec_has_not_for_sequences_is_refused(kind) -> None:
    tables = model_tables(WeightedModel())
    made = sharding(tables, {"*": "table_wise", "shops": kind}, 2)
    with pytest.raises(UserError, match=f"'shops': TorchRec cannot shard an EmbeddingCollection {kind}"):
        made.plan(None)
    planned = sharding(tables, {"*": "table_wise"}, 2).constraints()["shops"].sharding_types
    assert planned is not None
    assert set(planned) <= set(SEQUENCE_TYPES)
