"""What plugins say of sharded tables is carried out, or refused with their name before memory is taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import CommOp, KeyValueParams
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from recpipe.distributed.ranks import Ranks
from recpipe.errors import UserError
from recpipe.plugin.api import (
    Aspect,
    Context,
    Contribution,
    Origin,
    Plugin,
    TableClaim,
    TableInfo,
    TablePolicy,
)
from recpipe.plugin.assembly import Assembly, assemble
from recpipe.plugin.errors import PluginError
from recpipe.tables.build import TierConfig, is_sharded, plan_shards
from recpipe.tables.groups import ModelTables
from recpipe.tables.sharding.collection import ShardedCollection, ShardedTables, join_group
from recpipe.tables.sharding.planning import Sharding
from tests.tables.samples import CPU
from tests.tables.sharded import DIM, FEATURES, SIZE, Placed, batches, contents, table_set, train

GPU = torch.device("cuda")
POOLED = CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL
TIERS = TierConfig("resident", "host", "25%", None, prefetch=True, sharded=False)


class Nothing(Plugin):
    def contribute(self, ctx: Context) -> Contribution:
        return Contribution()


class Typed(TablePolicy):
    def __init__(self, said: str | None) -> None:
        self.said = said

    def data_type(self, name: str) -> str | None:
        return self.said


class Limited(TablePolicy):
    def __init__(self, **limits: Any) -> None:
        self.limits = limits

    def constrain(self, name: str, table: TableInfo) -> ParameterConstraints:
        return ParameterConstraints(**self.limits)


def assembly(**parts: Any) -> Assembly:
    info = {f.name: TableInfo(f.name, f.rows, DIM) for f in FEATURES}
    return assemble([(Origin("acme"), Nothing(), Contribution(**parts))], info)


def claim(policy: TablePolicy, *aspects: Aspect) -> TableClaim:
    return TableClaim("*", frozenset(aspects), policy)


def sharding(
    optimizer: str = "adagrad", device: torch.device = CPU, world: int = 1, **parts: Any
) -> Sharding:
    tables = ModelTables.single(table_set(optimizer))
    return Sharding(tables, assembly(**parts), device, world, -(-SIZE // world), False, "fused", 1.0)


def built(made: Sharding) -> ShardedCollection:
    (tables,) = ShardedTables(made, made.plan(join_group(CPU, Ranks())), Ranks()).collections
    return tables


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
def test_a_type_shards_the_tables_and_is_what_they_are_stored_in(optimizer: str) -> None:
    """A claim of precision alone; whatever the planner chooses, the optimizer's state stays float32."""
    claims = [claim(Typed("fp16"), "precision")]
    assert is_sharded(TIERS, assembly(tables=claims))
    tables = built(sharding(optimizer, tables=claims))
    for feature in FEATURES:
        for shard in tables.local(feature.name):
            assert shard.weights.dtype == torch.float16
            assert shard.state.dtype == torch.float32 or not shard.state.numel()


@pytest.mark.parametrize("said", ["fp32", None])
def test_float32_needs_no_sharding(said: str | None) -> None:
    assert not is_sharded(TIERS, assembly(tables=[claim(Typed(said), "precision")]))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("half", "data_type() stores table 'a' in 'half'; choose one of fp32, fp16, bf16"),
        ("int8", "'int8'; choose one of"),
        ("bf16", "data_type() stores table 'a' in bf16, which FBGEMM trains on GPUs alone"),
    ],
)
def test_types_that_cannot_be_trained_are_refused(said: str, message: str) -> None:
    with pytest.raises(PluginError) as refused:
        sharding(tables=[claim(Typed(said), "precision")]).data_types()
    assert message in str(refused.value)
    assert "plugin acme" in str(refused.value)


def test_replicated_tables_of_lower_precision_are_refused() -> None:
    claims = [claim(Typed("fp16"), "precision"), claim(Placed({"*": "data_parallel"}), "placement")]
    with pytest.raises(UserError, match="table 'a': a data_parallel table of lower precision"):
        sharding(tables=claims).plan(None)


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
        sharding(tables=[claim(Limited(**limits), "kernel")]).constraints()
    assert "plugin acme" in str(refused.value)
    assert "constrain() of table 'a'" in str(refused.value)
    assert field in str(refused.value)


def test_a_gpu_has_what_a_cpu_would_ignore() -> None:
    policy = Limited(stochastic_rounding=True, enforce_hbm=True, device_group="cuda")
    assert sharding(device=GPU, tables=[claim(policy, "kernel")]).constraints()["a"].stochastic_rounding


@pytest.mark.parametrize(
    "key", [(CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL, "forward"), (POOLED, "forwards"), ("pooled", "forward")]
)
def test_codecs_that_nothing_uses_are_refused(key: Any) -> None:
    with pytest.raises(PluginError, match=r"acme.*: brings a codec of .* which pooled tables never use"):
        sharding(codecs={key: object()}).sharders()


class OwnOptimizer(EmbeddingBagCollectionSharder):  # type: ignore[misc]
    """Takes nothing that it is given."""

    @property
    def fused_params(self) -> dict[str, Any]:
        return {"learning_rate": 0.5}


@pytest.mark.parametrize(
    ("kind", "sharder", "message"),
    [
        (
            EmbeddingBagCollection,
            EmbeddingCollectionSharder(),
            "brings EmbeddingCollectionSharder as the sharder",
        ),
        (nn.Linear, EmbeddingBagCollectionSharder(), "as the sharder of Linear"),
        (EmbeddingBagCollection, object(), "brings object as the sharder of EmbeddingBagCollection"),
        (EmbeddingBagCollection, OwnOptimizer(), "fused_params['optimizer'] = None, but this run's is"),
        (
            EmbeddingBagCollection,
            EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.5}),
            "fused_params['learning_rate'] = 0.5, but this run's is 0.1",
        ),
    ],
)
def test_sharders_that_cannot_be_used_are_refused(kind: type[nn.Module], sharder: Any, message: str) -> None:
    """By ``plan_shards``, before a planner sees them."""
    parts = assembly(sharders={kind: sharder})
    with pytest.raises(PluginError) as refused:
        plan_shards(ModelTables.single(table_set("adagrad")), TIERS, parts, CPU, SIZE, Ranks(), 1)
    assert f"plugin {Origin('acme')}: " in str(refused.value)
    assert message in str(refused.value)


@pytest.mark.parametrize("optimizer", ["adagrad", "rowwise_adagrad"])
def test_a_plugins_sharder_trains_as_recpipes_own(optimizer: str) -> None:
    """It gets the fused optimizer, and no columns are cut where that would change row-wise Adagrad."""
    mine = EmbeddingBagCollectionSharder()
    theirs = built(sharding(optimizer, sharders={EmbeddingBagCollection: mine}))
    ours = built(sharding(optimizer))
    assert mine.fused_params is None, "the plugin's own object is left as it was"
    for sparse in batches(3):
        for tables in (theirs, ours):
            train(tables, sparse, 0, sparse.stride())
    found, expected = contents(theirs), contents(ours)
    for table, values in expected.items():
        for got, value in zip(found[table], values, strict=True):
            np.testing.assert_allclose(got, value, rtol=0, atol=1e-6, err_msg=table)


def test_a_plugins_sharder_gets_the_codecs_of_all_plugins() -> None:
    pair = get_qcomm_codecs(QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.FP16))
    own = EmbeddingBagCollectionSharder(fused_params={"output_dtype": 0})
    made = sharding(sharders={EmbeddingBagCollection: own}, codecs={(POOLED, "forward"): pair.forward})
    (sharder,) = made.sharders()
    assert sharder.qcomm_codecs_registry[POOLED.name].forward is pair.forward
    assert sharder.fused_params["output_dtype"] == 0
    assert sharder.fused_params["optimizer"] == made.group_of["a"].optimizer.kind
