"""Tables sharded over real processes against whole tables; plans that are refused; plans as files."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from torchrec.distributed.planner.types import Topology
from torchrec.distributed.types import ShardingPlan, ShardingPlanner

from recpipe.common.tensors import TensorFiles
from recpipe.distributed.ranks import Ranks
from recpipe.errors import UserError
from recpipe.plugin.api import Contribution
from recpipe.plugin.assembly import assemble
from recpipe.plugin.calls import Origin
from recpipe.plugin.context import TableInfo
from recpipe.plugin.planner import Planner
from recpipe.plugin.tables import weight_name
from recpipe.private_api import module_name
from recpipe.report.record import write_json
from recpipe.tables.config import TierConfig
from recpipe.tables.groups import ModelTables
from recpipe.tables.owners import is_sharded
from recpipe.tables.sharding.claims import ShardClaims
from recpipe.tables.sharding.plan import Shard, ShardPlan, TablePlan, load_plan
from recpipe.tables.sharding.planning import Prediction, Sharding
from tests.mutations import in_bytes, mutated
from tests.processes import start_ranks
from tests.tables.samples import CPU
from tests.tables.sharded import DIM, FEATURES, Case, Places, batches, build, claims_of, process, table_set

BITWISE = ("table_wise", "column_wise", "table_column_wise")
"""Types that look every row up on one rank, so that no sum changes its order."""
MIXED = {"a": "table_wise", "b": "row_wise", "keys": "data_parallel", "*": "table_row_wise"}
CASES = (
    *(Case("adagrad", {"*": kind}) for kind in (*BITWISE, "row_wise", "data_parallel", "table_row_wise")),
    Case("sgd", {"*": "row_wise"}),
    Case("sgd", {"*": "column_wise"}),
    Case("rowwise_adagrad", MIXED),
)
TWO_HOSTS = (Case("adagrad", {"*": "grid_shard"}, 2), Case("rowwise_adagrad", {"*": "table_row_wise"}, 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "cases"), [(2, CASES), (4, TWO_HOSTS)], ids=["two ranks", "two hosts of two ranks"]
)
def test_ranks_train_what_one_process_trains(tmp_path, world, cases) -> None:
    """12 uneven batches of bags, the last of one sample; weights and optimizer state of all rows."""
    start_ranks(process, (world, str(tmp_path), cases, 12), world)
    told = json.loads((tmp_path / "told.json").read_text())
    for case in cases:
        found = told[case.name]
        expected = {f.name: case.types.get(f.name, case.types.get("*")) for f in FEATURES}
        assert found["kinds"] == expected
        assert found["moved"] > 0.1, "the tables were trained"
        for name, difference in found["difference"].items():
            limit = 0.0 if expected[name] in BITWISE else 2e-6
            assert difference <= limit, (case.name, name)
        replicated = set(expected.values()) == {"data_parallel"}
        assert (found["sent"] == 0) == replicated, case.name


def sharding(optimizer: str = "sgd", split_rows: bool = False, **types: str) -> Sharding:
    tables = ModelTables.single(table_set(optimizer))
    return Sharding(tables, claims_of(types or {"*": "table_wise"}), CPU, 2, 16, split_rows, "fused", 1.0)


def plan(**changes: TablePlan) -> ShardPlan:
    whole = {
        f.name: TablePlan("table_wise", "fused", f.rows, DIM, (i % 2,), (Shard(i % 2, 0, 0, f.rows, DIM),))
        for i, f in enumerate(FEATURES)
    }
    return ShardPlan(2, {**whole, **changes})


def columns(table: str = "b") -> TablePlan:
    half = DIM // 2
    rows = next(f.rows for f in FEATURES if f.name == table)
    shards = (Shard(0, 0, 0, rows, half), Shard(1, 0, half, rows, half))
    return TablePlan("column_wise", "fused", rows, DIM, (0, 1), shards)


def test_planning_takes_no_memory_and_no_process_group() -> None:
    made = sharding(**{"*": "row_wise"}).plan(None)
    assert {t.sharding for t in made.tables.values()} == {"row_wise"}
    assert [s.rows for s in made.tables["b"].shards] == [301, 300]
    assert all(s.predicted_ms is not None for t in made.tables.values() for s in t.shards)


def test_no_planner_splits_rows_under_row_wise_adagrad() -> None:
    with pytest.raises(UserError, match="table 'a': column_wise gives each part"):
        sharding("rowwise_adagrad", **{"*": "column_wise"}).plan(None)
    made = sharding("rowwise_adagrad", split_rows=True, **{"*": "column_wise"})
    assert made.splits_states(made.plan(None))


def test_a_grid_needs_columns_for_every_host() -> None:
    made = sharding(**{"*": "grid_shard"})
    assert {t.sharding for t in made.plan(None).tables.values()} == {"grid_shard"}
    narrow = replace(made, tables=ModelTables.single(replace(table_set("sgd"), dim=64)))
    with pytest.raises(UserError, match=r"'a': grid_shard needs 128 columns for each host.*have 64"):
        narrow.plan(None)


def test_a_plan_that_splits_rows_is_refused_or_declared() -> None:
    with pytest.raises(UserError, match=r"table 'b': column_wise gives each part.*tiers.split_rows=true"):
        sharding("rowwise_adagrad").check(plan(b=columns()), {})
    sharding("rowwise_adagrad", split_rows=True).check(plan(b=columns()), {})
    assert sharding("rowwise_adagrad", split_rows=True).splits_states(plan(b=columns()))
    assert not sharding("adagrad").splits_states(plan(b=columns()))
    sharding("adagrad").check(plan(b=columns()), {})


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (replace(plan(), world=4), "for 4 ranks and this run has 2"),
        (ShardPlan(2, {n: t for n, t in plan().tables.items() if n != "keys"}), "the table 'keys'"),
        (
            plan(keys=replace(plan().tables["keys"], rows=4)),
            "'keys' with 4 x 256 values, the recipe with 3 x 256",
        ),
        (plan(b=columns()), "'b' is column_wise, but only table_wise is allowed"),
        (
            plan(b=replace(plan().tables["b"], kernel="fused_uvm")),
            "'b' is planned for the kernel fused_uvm, but tiers.kernel and the plugins allow fused or dense",
        ),
    ],
)
def test_plans_for_something_else_are_refused(wrong, words) -> None:
    with pytest.raises(UserError, match=words):
        sharding().check(wrong)


def test_a_plan_survives_its_file(tmp_path) -> None:
    made = plan(b=columns())
    write_json(tmp_path / "plan.json", made.to_dict())
    assert load_plan(tmp_path / "plan.json") == made


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rank": 2}, "a shard on rank 2 of 2"),
        ({"row": 1}, "do not tile its 601 x 256"),
        ({"columns": 64}, "do not tile"),
        ({"column": 0}, "do not tile"),
    ],
)
def test_shards_that_do_not_tile_their_table_are_refused(tmp_path, change, words) -> None:
    table = columns()
    bad = replace(table, shards=(table.shards[0], replace(table.shards[1], **change)))
    write_json(tmp_path / "plan.json", plan(b=bad).to_dict())
    with pytest.raises(UserError, match=words):
        load_plan(tmp_path / "plan.json")


def rows() -> TablePlan:
    return TablePlan(
        "row_wise", "fused", 601, DIM, (0, 1), (Shard(0, 0, 0, 301, DIM), Shard(1, 301, 0, 300, DIM))
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: p.update(schema="1"), "schema is '1', not a whole number"),
        (lambda p: p.update(world="2"), "world is '2', not a whole number"),
        (lambda p: p.update(world=None), "world is None"),
        (lambda p: p.update(more=1), "'more', which is unknown"),
        (lambda p: p["tables"].update(b=3), "tables.b is 3, not a mapping"),
        (lambda p: p["tables"]["b"].pop("kernel"), "tables.b lacks 'kernel'"),
        (lambda p: p["tables"]["b"].update(kernel="warp"), "kernel 'warp': there is no such table"),
        (lambda p: p["tables"]["b"].update(sharding="x"), "'x' with kernel 'fused': there is no such table"),
        (lambda p: p["tables"]["b"].update(kernel="quant"), "kernel 'quant': there is no such table"),
        (lambda p: p["tables"]["b"].update(sharding="data_parallel"), "'data_parallel' with kernel 'fused'"),
        (lambda p: p["tables"]["b"].update(rows=0, shards=[]), "do not tile its 0 x 256"),
        (lambda p: p["tables"]["b"].update(ranks=["0"]), r"tables.b.ranks\[0\] is '0'"),
        (lambda p: p["tables"]["b"].update(ranks=[]), "ranks not listed, as row_wise needs"),
        (lambda p: p["tables"]["b"].update(rows=601.0), "tables.b.rows is 601.0, not a whole number"),
        (lambda p: p["tables"]["b"]["shards"][0].update(row="x"), r"shards\[0\].row is 'x'"),
        (lambda p: p["tables"]["b"]["shards"][0].update(predicted_ms=float("inf")), "Infinity is no number"),
        (lambda p: p["tables"]["b"]["shards"].reverse(), "table 'b' is not cut"),
        (lambda p: _move(p["tables"]["b"]["shards"]), "table 'b' is not cut"),
        (lambda p: p["tables"]["b"].update(sharding="table_wise"), "table 'b' is not cut"),
    ],
)
def test_a_plans_values_are_checked(tmp_path, change, words) -> None:
    content = plan(b=rows()).to_dict()
    content = json.loads(json.dumps(content))
    change(content)
    (tmp_path / "plan.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=rf"plan\.json is no sharding plan \(.*{words}"):
        load_plan(tmp_path / "plan.json")


def _move(shards) -> None:
    """Cut one row earlier: it tiles the table, and TorchRec would look for that row on the other rank."""
    shards[0]["rows"], shards[1]["row"], shards[1]["rows"] = 300, 300, 301


def test_plans_with_random_damage_are_read_or_refused(tmp_path) -> None:
    made = {**plan(b=rows()).to_dict()}
    file = tmp_path / "plan.json"
    refused = 0
    for seed in range(400):
        rng = random.Random(seed)
        text = json.dumps(mutated(rng, json.loads(json.dumps(made)))).encode()
        file.write_bytes(in_bytes(rng, text) if rng.random() < 0.2 else text)
        try:
            sharding().check(load_plan(file), {})
        except UserError:
            refused += 1
    assert 200 < refused < 400


def test_pieces_that_do_not_cover_a_tensor_once_are_refused(tmp_path) -> None:
    def write(name: str, place: object, rows: int = 4, dtype: type = np.float32) -> None:
        told = json.dumps({"a.weight": {"saved_offsets": place}})
        tensors = {"a.weight": np.zeros((rows, 2), dtype)}
        save_file(tensors, tmp_path / f"{name}.safetensors", {"DCP_SHARDING_INFO": told})

    write("1", [0, 0])
    write("2", [4, 0])
    assert TensorFiles.sharded(tmp_path).shape("a.weight") == (8, 2)
    for place, words in (
        ([5, 0], "do not cover its 9 x 2 values once"),
        ([3, 0], "do not cover its 7 x 2"),
        ([0, 0], "do not cover its 4 x 2"),
        ([4, 1], "do not cover its 8 x 3"),
        ([4], r"is \(4, 2\) at \(4,\)"),
        (["4", 0], r"saved_offsets\[0\] is '4'"),
        ([-4, 0], "do not cover"),
        (3, "saved_offsets is 3, not a list"),
    ):
        write("2", place)
        with pytest.raises(UserError, match=words):
            TensorFiles.sharded(tmp_path)
    write("2", [4, 0], dtype=np.float16)
    with pytest.raises(UserError, match=r"2\.safetensors .*'a.weight' is F16, not F32"):
        TensorFiles.sharded(tmp_path)
    (tmp_path / "2.safetensors").write_bytes(b"short")
    with pytest.raises(UserError, match=r"2\.safetensors is no table file of a checkpoint"):
        TensorFiles.sharded(tmp_path)


@pytest.mark.parametrize(
    "content", ["{}", "[1]", '{"schema": 2}', "no json", '{"schema": 1, "tables": {"a": 1}}']
)
def test_files_that_are_no_plan_are_refused(tmp_path, content) -> None:
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(UserError, match=r"plan\.json"):
        load_plan(tmp_path / "plan.json")
    with pytest.raises(UserError, match=r"absent\.json is no sharding plan"):
        load_plan(Path(tmp_path, "absent.json"))


def test_one_rank_pads_nothing_and_reads_what_it_wrote() -> None:
    tables = build(Case("adagrad", {"*": "table_wise"}), Ranks())
    (sparse, *_) = batches(1)
    assert tables.env.given(sparse, weighted=False) is sparse
    region = next(r for r in tables.regions() if r.table == "b")
    values = tuple(np.random.default_rng(0).random(v.shape, np.float32) for v in tables.read(region))
    tables.write(region, values)
    for read, written in zip(tables.read(region), values, strict=True):
        np.testing.assert_array_equal(read, written)


@pytest.mark.parametrize("optimizer", ["adagrad", "sgd"])
def test_all_shards_of_a_table_on_one_rank_are_saved(tmp_path, optimizer) -> None:
    case = Case(optimizer, {"*": "column_wise"})
    tables = build(case, Ranks())
    assert len(tables.local["b"]) == 2
    rng = np.random.default_rng(0)
    written = {r: tuple(rng.random(v.shape, np.float32) for v in tables.read(r)) for r in tables.regions()}
    for region, values in written.items():
        tables.write(region, values)
    tables.save_tables(tmp_path)
    other = build(case, Ranks())
    other.load_tables(tmp_path)
    files = TensorFiles.sharded(tmp_path)
    for region, (weights, state) in written.items():
        for read, expected in zip(other.read(region), (weights, state), strict=True):
            np.testing.assert_array_equal(read, expected)
        found = files.rows(weight_name(region.table), region.start, region.stop)
        np.testing.assert_array_equal(found, weights)


class Lone(ShardingPlanner):  # type: ignore[misc]
    """Every table on rank 1, and a prediction."""

    def __init__(self, topology: Topology, limits: object) -> None:
        self.prediction = Prediction({module_name(f.name): [7.5] for f in FEATURES})

    def plan(self, module, sharders) -> ShardingPlan:
        return plan_on(1).torchrec(CPU, 2, {}, ModelTables.single(table_set("sgd")))

    def collective_plan(self, module, sharders, pg=None) -> ShardingPlan:
        return self.plan(module, sharders)


class LonePlanner(Planner):
    def make(self, topology, constraints) -> Lone:
        return Lone(topology, constraints)


def plan_on(rank: int) -> ShardPlan:
    return ShardPlan(
        2,
        {
            f.name: TablePlan("table_wise", "fused", f.rows, DIM, (rank,), (Shard(rank, 0, 0, f.rows, DIM),))
            for f in FEATURES
        },
    )


def test_a_plugin_brings_its_planner_and_what_it_predicts() -> None:
    brought = Contribution(planner=LonePlanner())
    info = {f.name: TableInfo(f.name, f.rows, DIM) for f in FEATURES}
    made = assemble([(Origin("lone"), Places({}), brought)], info, prefer={})
    planned = replace(sharding(), claims=ShardClaims.of(made)).plan(None)
    assert {s.rank for t in planned.tables.values() for s in t.shards} == {1}
    assert {s.predicted_ms for t in planned.tables.values() for s in t.shards} == {7.5}
    assert is_sharded(TierConfig("resident", "host", "25%", None, prefetch=True, sharded=False), made)
