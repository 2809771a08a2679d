"""Plans of models with several collections, of bags and of sequences, whose batches are of any type."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from recpipe_neo.estimate import CostModel, MeasuredStep, TableCosts
from recpipe_neo.planner import PLANNERS, MeasuredPlanner, PlanRecord, make_planner
from recpipe_neo.stats import feature_stats
from recpipe_neo.tests.rig import machine, made_up, topology
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.tables.sharding.planning import TableSharder

SAMPLES = 64
LONG = 20
"""Ids of a sample in every feature."""
SHARDERS = [TableSharder(), EmbeddingCollectionSharder()]


def model() -> nn.Module:
    """Two collections of two equal tables, and a sequence of one table with two features."""
    made, nowhere = nn.Module(), torch.device("meta")
    for part, dim in (("left", 64), ("right", 16)):
        configs = [
            EmbeddingBagConfig(
                name=f"{part}{i}", embedding_dim=dim, num_embeddings=5000, feature_names=[f"{part}{i}"]
            )
            for i in range(2)
        ]
        setattr(made, part, EmbeddingBagCollection(tables=configs, device=nowhere))
    config = EmbeddingConfig(
        name="seen", embedding_dim=16, num_embeddings=5000, feature_names=["seen", "bought"]
    )
    made.history = EmbeddingCollection(tables=[config], device=nowhere)
    return made


TABLES = {f"{part}{i}": (f"{part}{i}",) for part in ("left", "right") for i in range(2)} | {
    "seen": ("seen", "bought")
}


def batches() -> list[dict[str, object]]:
    """Two, with ids in two places."""

    def ids(features: list[str], seed: int) -> KeyedJaggedTensor:
        count = len(features) * 2 * SAMPLES
        values = np.random.default_rng(seed).integers(0, 5000, count * LONG)
        return KeyedJaggedTensor(features, torch.from_numpy(values), lengths=torch.full((count,), LONG))

    bags = ["left0", "left1", "right0", "right1"]
    return [{"bags": ids(bags, n), "more": [ids(["seen", "bought"], 9 + n)]} for n in range(2)]


@pytest.mark.parametrize("kind", PLANNERS)
def test_the_tables_of_all_collections_are_placed_together(kind: str) -> None:
    """Each collection's two equal tables may go to one rank, if the other rank has as much of another's."""
    limits = {
        name: ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])
        for name in TABLES
    }
    record = PlanRecord()
    stats = feature_stats(batches())
    planner = make_planner(kind, topology(2), limits, SAMPLES, stats, Path("unused"), record, TABLES)
    if isinstance(planner, MeasuredPlanner):
        planner.profile = made_up(machine(2))
    plan = planner.plan(model(), SHARDERS)
    assert {path: set(module) for path, module in plan.plan.items()} == {
        "left": {"left0", "left1"}, "right": {"right0", "right1"}, "history": {"seen"},
    }  # fmt: skip
    loads = [sum(rank.values()) for rank in record.ranks.values()]
    assert min(loads) > 0.4 * max(loads)
    assert {name for rank in record.ranks.values() for name in rank} == set(TABLES)


def options(kind: str) -> dict[str, ShardingOption]:
    """Of every table, sharded so."""
    limits = {
        name: ParameterConstraints(sharding_types=[kind], compute_kernels=["fused"], pooling_factors=[LONG])
        for name in TABLES
    }
    found = EmbeddingEnumerator(topology(2), SAMPLES, limits).enumerate(model(), SHARDERS)
    return {option.name: option for option in found}


def test_rows_that_are_not_pooled_are_sent_one_by_one() -> None:
    """A sequence sends as many rows as ids, and no type of it has a reduce-scatter."""
    costs = TableCosts(CostModel(made_up(machine(2), exchange=100)), feature_stats(batches()), topology(2))
    by_rows, whole = options("row_wise"), options("table_wise")
    assert costs.measured_as(by_rows["seen"]) == "table_wise"
    assert costs.measured_as(by_rows["left0"]) == "row_wise"
    bag, sequence = (costs.shared(whole[name]).sum() for name in ("right0", "seen"))
    assert sequence > 4 * bag, "of one dimension"
    waits = {name: costs.idle(costs.measured_as(by_rows[name]), [by_rows[name]]) for name in TABLES}
    assert all(wait.shape == (3,) for wait in waits.values())


def test_every_collection_has_exchanges_of_its_own() -> None:
    """What one of them costs at least is paid by each."""
    costs = TableCosts(CostModel(made_up(machine(2))), feature_stats(batches()), topology(2))
    found = options("table_wise")
    costs.know(list(found.values()))
    for option in found.values():
        for shard in option.shards:
            shard.rank, shard.perf = 0, costs.shard(option, shard)
    step = MeasuredStep(costs)

    def fixed(*names: str) -> float:
        """What there is beside the tables' own cost on the rank that has none."""
        plan = [found[name] for name in names]
        return float(step.busy(plan)[1].sum() - sum(costs.shared(option).sum() for option in plan))

    once = costs.model.fixed("table_wise").sum()
    assert fixed("left0", "left1") == pytest.approx(once)
    assert fixed("left0", "right0", "seen") == pytest.approx(3 * once)
