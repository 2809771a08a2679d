"""Plans of the planners; a machine's made-up laws decide, and limits hold."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from recpipe_neo import measure
from recpipe_neo.estimate import MeasuredStep
from recpipe_neo.machine_profile import MachineProfile, machines
from recpipe_neo.planner import PLANNERS, MeasuredPlanner, PlanRecord, make_planner
from recpipe_perf_model import SharedProfile
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, data_parallel, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from plugins.recpipe_neo.tests.rig import (
    bags,
    collection,
    machine,
    made_up,
    measure_little,
    topology,
    uniform_stats,
)
from recpipe.errors import UserError
from recpipe.tables.sharding.planning import TableSharder
from tests.processes import start_ranks
from tests.ranks import joined

ROWS = ["table_wise", "row_wise", "table_row_wise"]
SAMPLES = 256


def planned(
    tables: dict[str, tuple[int, int]],
    pooling: dict[str, int],
    types: list[str] = ROWS,
    world: int = 2,
    exchange: float = 1.0,
    bytes_per_rank: int = 2**34,
) -> tuple[ShardingPlan, PlanRecord]:
    """By the laws of a made-up machine."""
    record = PlanRecord()
    stats = {name: uniform_stats(tables[name][0], n, SAMPLES * world) for name, n in pooling.items()}
    limits = {
        name: ParameterConstraints(sharding_types=types, compute_kernels=["fused", "dense"], min_partition=8)
        for name in tables
    }
    planner = make_planner(
        "measured", topology(world, bytes_per_rank), limits, SAMPLES, stats, Path("unused"), record
    )
    assert isinstance(planner, MeasuredPlanner)
    planner.profile = made_up(machine(world), exchange)
    return planner.plan(collection(tables), [TableSharder()]), record


def ranks_of(plan: ShardingPlan, table: str) -> list[int]:
    return list(plan.plan["tables"][table].ranks)


def test_even_tables_stay_whole_and_are_spread() -> None:
    tables = {f"t{i}": (10_000, 16) for i in range(6)}
    plan, record = planned(tables, dict.fromkeys(tables, 20))
    assert set(record.sharding.values()) == {"table_wise"}
    assert sorted(ranks_of(plan, name)[0] for name in tables) == [0, 0, 0, 1, 1, 1]
    assert {name for rank in record.ranks.values() for name in rank} == set(tables)
    assert record.busy_ms[0] == pytest.approx(record.busy_ms[1], rel=0.05)
    assert record.step_ms is not None
    assert record.step_ms > max(record.busy_ms)


def test_a_table_of_half_the_work_or_more_is_cut() -> None:
    """20 of the 24 lookups of a sample are the first one's: whole, its rank would have them all."""
    tables = {"hot": (100_000, 64), "a": (10_000, 64), "b": (10_000, 64)}
    pooling = {"hot": 200, "a": 2, "b": 2}
    plan, record = planned(tables, pooling, world=4)
    assert record.sharding["hot"] != "table_wise"
    assert ranks_of(plan, "hot") == [0, 1, 2, 3]
    _, whole = planned(tables, pooling, types=["table_wise"], world=4)
    assert record.step_ms is not None
    assert whole.step_ms is not None
    assert record.step_ms < 0.7 * whole.step_ms


def test_expensive_exchanges_change_the_plan() -> None:
    """A small table is replicated where sending its pooled rows costs more than summing its gradients."""
    tables = {"small": (100, 16), "large": (200_000, 16)}
    pooling = {"small": 1, "large": 1}
    types = ["table_wise", "data_parallel"]
    assert planned(tables, pooling, types, exchange=100)[1].sharding == {
        "small": "data_parallel",
        "large": "table_wise",
    }
    assert planned(tables, pooling, types, exchange=0.01)[1].sharding["large"] == "table_wise"


def test_constraints_and_memory_hold() -> None:
    """No columns unless asked for; a table that no rank can hold is cut."""
    tables = {"hot": (100_000, 64), "a": (100, 64)}
    for types in (["table_wise"], ["column_wise", "table_wise"], ["row_wise"]):
        _, record = planned(tables, {"hot": 200, "a": 1}, types)
        assert set(record.sharding.values()) <= set(types)
    assert record.sharding["a"] == "row_wise"
    _, tight = planned(tables, {"hot": 1, "a": 1}, bytes_per_rank=22 * 2**20)
    assert tight.sharding["hot"] in ("row_wise", "table_row_wise")
    assert planned(tables, {"hot": 1, "a": 1})[1].sharding["hot"] == "table_wise"


def test_the_popular_rows_side_of_a_table_is_the_loaded_one() -> None:
    """Rows are cut in blocks: lookups of the first hundred rows all meet one rank."""
    stats = {"a": uniform_stats(100, 50, 2 * SAMPLES)}
    limits = {"a": ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"])}
    record = PlanRecord()
    planner = make_planner("measured", topology(2), limits, SAMPLES, stats, Path("unused"), record)
    assert isinstance(planner, MeasuredPlanner)
    planner.profile = made_up(machine(2))
    planner.plan(collection({"a": (100_000, 16)}), [TableSharder()])
    assert record.ranks[0]["a"] > 1.5 * record.ranks[1]["a"]


@pytest.mark.parametrize("kind", ["torchrec", "greedy", "karmarkar_karp"])
def test_the_analytic_planners_plan(kind: str) -> None:
    tables = {f"t{i}": (10_000 * (i + 1), 16) for i in range(6)}
    record = PlanRecord()
    limits = {name: ParameterConstraints(sharding_types=ROWS, compute_kernels=["fused"]) for name in tables}
    stats = {"t0": uniform_stats(10_000, 40, 64)}
    planner = make_planner(kind, topology(2), limits, 64, stats, record=record)
    plan = planner.plan(collection(tables), [TableSharder()])
    assert set(plan.plan["tables"]) == set(tables) == set(record.sharding)
    assert record.step_ms is not None
    loads = [sum(rank.values()) for rank in record.ranks.values()]
    assert record.step_ms == pytest.approx(max(loads), rel=0.3)
    assert record.busy_ms == []
    if kind != "torchrec":
        of = {name: ms for rank in record.ranks.values() for name, ms in rank.items()}
        assert of["t0"] > 3 * of["t1"], "the analytic costs are told the measured pooling factor"


def test_mistakes_are_named() -> None:
    with pytest.raises(UserError, match="planner=fast is unknown; choose one of torchrec, greedy"):
        make_planner("fast", topology(2), {}, 64)
    with pytest.raises(UserError, match="keeps its measurements in a directory"):
        make_planner("measured", topology(2), {}, 64)


def _rank(rank: int, world: int, meeting: str, folder: str) -> None:
    """Measures a little, plans, trains a step by each planner's plan, and compares it with one process."""
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    measure_little(pytest.MonkeyPatch())  # for good: this process ends with the test
    with joined(rank, world, meeting):
        for kind in PLANNERS:
            record = PlanRecord()
            tables = {"hot": (4000, 16), "a": (500, 16), "b": (500, 16)}
            limits = {n: ParameterConstraints(sharding_types=ROWS, compute_kernels=["fused"]) for n in tables}
            stats = {name: uniform_stats(rows, 30, 128) for name, (rows, _) in tables.items()}
            planner = make_planner(kind, topology(world), limits, 64, stats, Path(folder), record)
            _trains_as_one_process(planner.collective_plan, tables, rank)
            assert bool(record.sharding) == (rank == 0)
        assert isinstance(record.model, MeasuredStep)
        (file,) = Path(folder).iterdir()
        own = SharedProfile.load(file).profile
        (found,) = machines(own.host, own.samples)
        profile = MachineProfile.of(own.samples, found)
        assert profile is not None
        assert min(s.forward for s in profile.lookups) > 0
        assert {s.owns for s in profile.exchanges} == {True, False}
        before = file.stat().st_mtime_ns
        planner.collective_plan(collection(tables), [TableSharder()])
        assert file.stat().st_mtime_ns == before, "measured once"


def _trains_as_one_process(plan: object, tables: dict[str, tuple[int, int]], rank: int) -> None:
    module = collection(tables)
    fused = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5}
    sharder = TableSharder(fused_params=fused)
    group = dist.group.WORLD
    parallel = DistributedModelParallel(
        module,
        env=ShardingEnv.from_process_group(group),
        device=torch.device("cpu"),
        plan=plan(module, [sharder], group),
        sharders=[sharder],
    )
    configs = [
        EmbeddingBagConfig(name=n, num_embeddings=r, embedding_dim=d, feature_names=[n])
        for n, (r, d) in tables.items()
    ]
    whole = EmbeddingBagCollection(tables=configs)
    for name, bag in whole.embedding_bags.items():
        torch.nn.init.normal_(bag.weight, generator=torch.Generator().manual_seed(len(name)))
        for shard in parallel.module.tables.state_dict()[f"embedding_bags.{name}.weight"].local_shards():
            (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            shard.tensor.detach().copy_(bag.weight.detach()[row : row + rows, column : column + columns])
    draws = [np.random.default_rng(seed) for seed in range(2)]
    parts = [
        bags({n: (draw.integers(0, r, 64 * 3), np.full(64, 3)) for n, (r, _) in tables.items()}).sparse
        for draw in draws
    ]
    pooled = parallel.module.tables(parts[rank]).wait()
    sum((pooled[name] ** 2).sum() for name in tables).backward()
    for part in parts:
        expected = whole(part)
        sum((expected[name] ** 2).sum() for name in tables).backward()
    for name, bag in whole.embedding_bags.items():
        # TorchRec divides the tables' gradients by the ranks.
        after = bag.weight.detach() - 0.5 * bag.weight.grad / 2
        for shard in parallel.module.tables.state_dict()[f"embedding_bags.{name}.weight"].local_shards():
            (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            torch.testing.assert_close(
                shard.tensor.detach(),
                after[row : row + rows, column : column + columns],
                atol=1e-4,
                rtol=1e-4,
            )


@pytest.mark.soak  # test_neo_ranks.py makes, keeps and trains by a plan
@pytest.mark.slow
def test_two_processes_measure_plan_and_train(tmp_path: Path) -> None:
    """Real measurements, cut short; every planner's plan updates the rows as one process does."""
    start_ranks(_rank, (2, str(tmp_path / "meet"), str(tmp_path / "profiles")), 2)


def test_a_single_process_measures_on_the_gpu_that_it_was_told() -> None:
    """TorchRec's generators of plans know of local ranks alone."""
    tables = collection({"a": (100, 16)}).tables
    made = {"a": table_wise(rank=0, compute_kernel="fused"), "b": data_parallel()}
    plans = {
        name: construct_module_sharding_plan(
            tables, {"a": kind}, TableSharder(), local_size=1, world_size=1, device_type="cuda"
        )["a"]
        for name, kind in made.items()
    }
    for plan in plans.values():
        measure._put_on(plan, torch.device("cuda", 3))
    assert [str(s.placement) for s in plans["a"].sharding_spec.shards] == ["rank:0/cuda:3"]
    assert plans["b"].sharding_spec is None
