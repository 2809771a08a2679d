"""What plugins say of sharded tables is carried out, or refused with their name before memory is taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import CommOp, KeyValueParams
from torchrec.modules.embedding_configs import DataType

from recpipe import private_api
from recpipe.common.machine import RESERVE
from recpipe.distributed.ranks import Ranks, join_group
from recpipe.errors import UserError
from recpipe.plugin.api import Contribution, Plugin
from recpipe.plugin.assembly import assemble
from recpipe.plugin.calls import Origin
from recpipe.plugin.context import Context, TableInfo
from recpipe.plugin.errors import PluginError
from recpipe.plugin.planner import Planner
from recpipe.plugin.quantizer import Quantizer
from recpipe.plugin.tables import SparseFeature, TableOptimizer, TableSet
from recpipe.tables.groups import ModelTables
from recpipe.tables.sharding.claims import ShardClaims
from recpipe.tables.sharding.collection import ShardedCollection
from recpipe.tables.sharding.plan import Shard, ShardPlan, TablePlan
from recpipe.tables.sharding.planning import Sharding
from recpipe.tables.sharding.tables import shard_tables
from tests.tables.samples import CPU
from tests.tables.sharded import DIM, FEATURES, SIZE, Placed, table_set

GPU = torch.device("cuda")
POOLED = CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL


class Nothing(Plugin):
    def contribute(self, ctx: Context) -> Contribution:
        return Contribution()


class Sent(Quantizer):
    def __init__(self, key: Any) -> None:
        self.key = key

    def codecs(self) -> dict[Any, Any]:
        return {self.key: object()}


class Limited(Planner):
    def __init__(self, **limits: Any) -> None:
        self.limits = limits

    def constrain(self, table: TableInfo) -> ParameterConstraints:
        return ParameterConstraints(**self.limits)


def claims(**parts: Any) -> ShardClaims:
    info = {f.name: TableInfo(f.name, f.rows, DIM) for f in FEATURES}
    return ShardClaims.of(assemble([(Origin("acme"), Nothing(), Contribution(**parts))], info))


def sharding(
    optimizer: str = "adagrad",
    device: torch.device = CPU,
    world: int = 1,
    storage: DataType = DataType.FP32,
    **parts: Any,
) -> Sharding:
    tables = ModelTables.single(replace(table_set(optimizer), storage=storage))
    return Sharding(tables, claims(**parts), device, world, -(-SIZE // world), False, "fused", 1.0)


def built(made: Sharding) -> ShardedCollection:
    (tables,) = shard_tables(made, made.plan(join_group(CPU, Ranks())), Ranks())
    return tables


def test_optimizers_that_are_not_torchrec_s_keep_rows_whole() -> None:
    """Recpipe makes their steps, on the rows that a batch looks up."""
    kinds = {table.sharding for table in sharding("adam").plan(None).tables.values()}
    assert kinds <= {"row_wise", "table_wise", "table_row_wise"}
    assert {"column_wise", "data_parallel"}.isdisjoint(sharding("adam").constraints()["a"].sharding_types)
    assert sharding("adagrad").constraints()["a"].sharding_types is None, "any"
    for kind, words in (("column_wise", "cuts rows apart"), ("data_parallel", "keeps a whole gradient")):
        with pytest.raises(UserError, match=f"table 'a': {kind} {words}.* its optimizer, adam .*row_wise"):
            sharding("adam", planner=Limited(sharding_types=[kind])).plan(None)


@pytest.mark.parametrize("caches", [True, False], ids=["uvm_caching", "another kernel"])
def test_a_gpus_cache_is_written_back_before_its_rows_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caches: bool
) -> None:
    """And emptied before they are replaced, in which order the newest values stay."""
    done: list[str] = []
    for name in ("flush", "reset_cache_states"):
        monkeypatch.setattr(
            SplitTableBatchedEmbeddingBagsCodegen, name, lambda _, name=name: done.append(name)
        )
    planner = Placed({"*": "table_wise"})
    tables = built(sharding(planner=planner))
    tables.cache.lookups = private_api.fused_lookups(tables.sharded) if caches else []
    works = {
        "read": lambda: tables.read(next(tables.regions())),
        "save": lambda: tables.save_tables(tmp_path),
        "write": lambda: tables.write(next(tables.regions()), tables.read(next(tables.regions()))),
        "load": lambda: tables.load_tables(tmp_path),
    }
    for name, work in works.items():
        done.clear()
        work()
        assert ("flush" in done) == caches
        assert ("reset_cache_states" in done) == (caches and name in ("write", "load"))
        if name in ("write", "load") and caches:
            assert done[-2:] == ["flush", "reset_cache_states"]


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
def test_tables_are_stored_in_their_type(optimizer: str) -> None:
    """Whatever the planner chooses, the optimizer's state stays float32."""
    tables = built(sharding(optimizer, storage=DataType.FP16))
    for feature in FEATURES:
        for shard in tables.local[feature.name]:
            assert shard.weights.dtype == torch.float16
            assert shard.state.dtype == torch.float32 or not shard.state.numel()


def test_replicated_tables_of_lower_precision_are_refused() -> None:
    planner = Placed({"*": "data_parallel"})
    with pytest.raises(UserError, match="table 'a': a data_parallel table of lower precision"):
        sharding(storage=DataType.FP16, planner=planner).plan(None)


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        ({"device_group": "cuda"}, "device_group=cuda, but recpipe's plans do not carry it"),
        ({"key_value_params": KeyValueParams()}, "key_value_params="),
        ({"use_virtual_table": True}, "use_virtual_table=True"),
        ({"stochastic_rounding": True}, "stochastic_rounding=True, but FBGEMM ignores it on a CPU"),
        ({"enforce_hbm": True}, "enforce_hbm=True, but FBGEMM ignores it on a CPU"),
        ({"compute_kernels": [EmbeddingComputeKernel.FUSED_UVM.value]}, "the kernel fused_uvm, which needs"),
    ],
)
def test_limits_without_effect_are_refused(limits: Mapping[str, Any], field: str) -> None:
    with pytest.raises(PluginError) as refused:
        sharding(planner=Limited(**limits)).constraints()
    assert "plugin acme" in str(refused.value)
    assert "constrain() of table 'a'" in str(refused.value)
    assert field in str(refused.value)


def test_a_part_of_a_gpu_is_left_to_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 of 100 GiB are free, and 4 of the 6 that this process has are in no use."""
    gib = 1 << 30
    for name, value in {
        "mem_get_info": (80 * gib, 100 * gib),
        "memory_reserved": 6 * gib,
        "memory_allocated": 2 * gib,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    (device,) = sharding(device=GPU).topology().devices
    assert device.storage.hbm == 84 * gib - int(RESERVE * 100 * gib)
    assert 0 < RESERVE < 0.5


def test_one_process_shards_on_the_gpu_that_it_was_told() -> None:
    """TorchRec refuses a shard whose tensor is on another GPU than its plan says."""

    def places(world: int, device: torch.device) -> set[str]:
        shards = tuple(Shard(rank, rank, 0, 1, 4) for rank in range(world))
        feature = SparseFeature("a", world)
        tables = ModelTables.single(TableSet.one_each([feature], 4, TableOptimizer("sgd", 0.1), seed=1))
        table = TablePlan("row_wise", "fused", world, 4, tuple(range(world)), shards)
        made = ShardPlan(world, {"a": table}).torchrec(device, 2, {}, tables)
        ((_, module),) = made.plan.items()
        return {str(shard.placement) for shard in module["a"].sharding_spec.shards}

    assert places(1, torch.device("cuda", 3)) == {"rank:0/cuda:3"}
    assert places(1, torch.device("cpu")) == {"rank:0/cpu"}
    expected = {"rank:0/cuda:0", "rank:1/cuda:1", "rank:2/cuda:0", "rank:3/cuda:1"}
    assert places(4, torch.device("cuda", 1)) == expected, "two GPUs on each of two machines"


def test_a_wrong_index_ends_a_run_on_a_gpu() -> None:
    """TorchRec's own choice, WARNING, looks up row 0 instead."""
    (on_gpu,), (on_cpu,) = sharding(device=GPU).sharders(), sharding().sharders()
    assert on_gpu.fused_params["bounds_check_mode"] is BoundsCheckMode.FATAL
    assert "bounds_check_mode" not in on_cpu.fused_params


def test_a_gpu_has_what_a_cpu_would_ignore() -> None:
    policy = Limited(stochastic_rounding=True, enforce_hbm=True, device_group="cuda")
    assert sharding(device=GPU, planner=policy).constraints()["a"].stochastic_rounding


@pytest.mark.parametrize(
    "key", [(CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL, "forward"), (POOLED, "forwards"), ("pooled", "forward")]
)
def test_codecs_that_nothing_uses_are_refused(key: Any) -> None:
    with pytest.raises(PluginError, match=r"acme.*: brings a codec of .* which pooled tables never use"):
        sharding(quantizer=Sent(key)).sharders()
