"""Several groups of tables (bags, weighted bags, sequences; their own dimensions and optimizers) sharded over
processes, beside the same tables whole."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.data.parts import in_order
from recpipe.data.select import between
from recpipe.distributed.ranks import Ranks, join_group
from recpipe.plugin.api import Contribution, Plugin
from recpipe.plugin.assembly import Assembly, assemble
from recpipe.plugin.context import TableInfo
from recpipe.plugin.planner import Planner
from recpipe.plugin.skipper import Skipper
from recpipe.plugin.tables import TableOptimizer
from recpipe.tables.grouped import GroupedCollection
from recpipe.tables.groups import ModelTables, collections_of, group_tables
from recpipe.tables.resident import ResidentCollection
from recpipe.tables.sharding.claims import ShardClaims
from recpipe.tables.sharding.collection import ShardedCollection
from recpipe.tables.sharding.planning import Sharding
from recpipe.tables.sharding.tables import shard_tables
from tests.plugin.samples import ACME
from tests.ranks import end_process, joined
from tests.tables.grouped import META, ROWWISE, SGD, Model, contents, ids
from tests.tables.samples import CPU
from tests.tables.sharded import ranks_of, started
from tests.tables.skippers import filter_of

SIZE = 13
"""Samples of a batch, which two ranks cannot share evenly."""
LEAST = 0.3
"""The norm of a gradient below which a row is not updated, where a case leaves rows out."""
WEIGHTED = "item"
"""The feature whose ids have weights that count."""


@dataclass(frozen=True)
class Case:
    """Sharding types by table; ``deaf``: a rank whose gradients are lost."""

    types: Mapping[str, str]
    deaf: int | None = None
    skips: str = ""
    """Whether rows are left out of updates: ``both`` here and in the whole tables, or here ``alone``."""

    @property
    def name(self) -> str:
        lost = "" if self.deaf is None else f" without rank {self.deaf}"
        skips = f" skips {self.skips}" if self.skips else ""
        return " ".join(dict.fromkeys(self.types.values())) + lost + skips


class SkipSmall(Skipper):
    """Leaves rows out by their gradients, and some by their numbers."""

    def __init__(self) -> None:
        self.share = [0, 0]
        """Rows left out, and rows asked about."""

    def update(self, rows: np.ndarray, gradients: torch.Tensor) -> torch.Tensor:
        norms = gradients.norm(dim=1)
        assert not ((norms - LEAST).abs() < 1e-6).any(), "rounding must not decide"
        stay = (norms >= LEAST) & torch.from_numpy(rows % 5 != 2)
        self.share[0] += int((~stay).sum())
        self.share[1] += len(rows)
        return stay


def filter_all(grouped: GroupedCollection, skipper: Skipper) -> None:
    """As a run does with a plugin's skipper."""
    for collection, base in zip(grouped.collections, grouped.tables.bases.tolist(), strict=False):
        collection.filter_updates(filter_of(skipper, base))


class WeightedModel(Model):
    """With weights for the ids of one table more."""

    def __init__(self, device: torch.device = META) -> None:
        super().__init__(device)
        table = EmbeddingBagConfig(
            name="weighted", embedding_dim=8, num_embeddings=500, feature_names=[WEIGHTED]
        )
        self.weighted = EmbeddingBagCollection([table], is_weighted=True, device=device)


def optimizer_of(name: str, weights: torch.Tensor) -> TableOptimizer:
    return {"seen": SGD, "shops": TableOptimizer("adagrad", 0.1)}.get(name, ROWWISE)


def model_tables(model: nn.Module) -> ModelTables:
    """The tables of ``model``, under three optimizers."""
    return group_tables(collections_of(model), optimizer_of, seed=3)


class Placed(Planner):
    def __init__(self, types: Mapping[str, str]) -> None:
        self.types = types

    def constrain(self, table: TableInfo) -> ParameterConstraints:
        kind = self.types.get(table.name, self.types["*"])
        return ParameterConstraints(sharding_types=[kind], min_partition=4)


class Places(Plugin):
    def __init__(self, types: Mapping[str, str]) -> None:
        self.types = types

    def contribute(self, ctx) -> Contribution:
        return Contribution(planner=Placed(self.types))


def assembled(tables: ModelTables, types: Mapping[str, str]) -> Assembly:
    plugin = Places(types)
    parts = [(ACME, plugin, plugin.contribute(None))]
    return assemble(parts, tables.infos(), prefer={})


def sharding(tables: ModelTables, types: Mapping[str, str], world: int, split_rows: bool = False) -> Sharding:
    parts = assembled(tables, types)
    return Sharding(tables, ShardClaims.of(parts), CPU, world, -(-SIZE // world), split_rows, "fused", 1.0)


def sharded(
    model: nn.Module, types: Mapping[str, str], ranks: Ranks, saved: Path | None = None
) -> GroupedCollection:
    """The tables of ``model``, planned and sharded over ``ranks``, of the rows in ``saved``."""
    made = sharding(started(model_tables(model), saved), types, ranks.world)
    whole = shard_tables(made, made.plan(join_group(CPU, ranks)), ranks, model, saved=saved)
    return GroupedCollection(made.tables, whole)


def weighted_ids(size: int, seed: int, one_each: bool = False) -> KeyedJaggedTensor:
    """Every id has a weight, but those of one feature count alone."""
    plain = ids(size, seed, one_each)
    weights = torch.rand(len(plain.values()), generator=torch.Generator().manual_seed(seed))
    return KeyedJaggedTensor(plain.keys(), plain.values(), weights, plain.lengths())


def train(grouped: GroupedCollection, sparse: KeyedJaggedTensor, first: int, total: int, heard: bool) -> None:
    """One step of a loss whose gradient differs from sample to sample; all ids travel before any row is used.

    ``first``: number of the first sample of ``sparse`` among the ``total`` ones of the batch.
    """
    sent = send(grouped, sparse)
    update(grouped, sparse, look_up(grouped, sparse, sent), first, total, heard)


def send(grouped: GroupedCollection, sparse: KeyedJaggedTensor) -> list[Any]:
    """The batch's ids on their way, group by group; None where tables are whole."""
    each = zip(grouped.tables.groups, grouped.collections, strict=True)
    ids = [(collection, in_order(sparse, group.tables.features)) for group, collection in each]
    return [c.start(own) if isinstance(c, ShardedCollection) else None for c, own in ids]


def look_up(grouped: GroupedCollection, sparse: KeyedJaggedTensor, sent: list[Any]) -> list[torch.Tensor]:
    """Rows of each group."""
    each, found = zip(grouped.tables.groups, grouped.collections, sent, strict=True), []
    for group, collection, ahead in each:
        if ahead is None:
            found.append(collection.lookup(in_order(sparse, group.tables.features)))
        else:
            ahead.send_ids()
            found.append(collection.joined(collection.finish(ahead)))  # type: ignore[attr-defined]
    return found


def update(
    grouped: GroupedCollection,
    sparse: KeyedJaggedTensor,
    found: list[torch.Tensor],
    first: int,
    total: int,
    heard: bool,
) -> None:
    """The backward pass of ``found`` rows; as ``train``."""
    for group, collection, rows in zip(grouped.tables.groups, grouped.collections, found, strict=True):
        own = in_order(sparse, group.tables.features)
        samples = torch.arange(first, first + own.stride())
        if not group.tables.pooled:
            samples = torch.repeat_interleave(samples.repeat(len(own.keys())), own.lengths())
        assert len(rows) == len(samples)
        columns = torch.linspace(0.5, 1.5, rows.shape[1])
        loss = ((rows + columns).square() * (1 + samples[:, None] / total) * columns).sum() / total
        (loss * float(heard)).backward()
        collection.update()


def process(rank: int, world: int, folder: str, cases: Sequence[Case], steps: int) -> None:
    """Train every case and save the first one's tables; rank 0 writes by case and table how far it is from
    whole tables, and its sharding type."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world)
    )
    with joined(rank, world, str(Path(folder, "meet"))):
        ranks, told = ranks_of(rank, world), {}
        for case in cases:
            model = WeightedModel()
            before = list(model.modules())
            ours = sharded(model, case.types, ranks)
            assert [*map(id, model.modules())] == [*map(id, before)]
            plain = model_tables(model)
            whole = GroupedCollection(plain, [ResidentCollection(g.tables, CPU) for g in plain.groups])
            skipper = SkipSmall()
            if case.skips:
                filter_all(ours, SkipSmall())
            if case.skips == "both":
                filter_all(whole, skipper)
            for step in range(steps):
                size = 1 if step == steps - 1 else SIZE
                sparse = weighted_ids(size, step)
                mine = ranks.shares(0, size)[rank]
                train(ours, between(sparse, mine.start, mine.stop), mine.start, size, rank != case.deaf)
                train(whole, sparse, 0, size, heard=True)
            found, expected = contents(ours), contents(whole)
            out, asked = skipper.share
            assert case.skips != "both" or 0.2 * asked < out < 0.8 * asked, skipper.share
            if case is cases[0]:
                check_files(Path(folder, "tables"), ours, model, case, ranks, found)
            kinds = {n: t.sharding for c in ours.collections for n, t in c.shards.items()}  # type: ignore[attr-defined]
            scale = {n: np.maximum(1, np.abs(v)) for n, v in expected.items()}
            told[case.name] = {
                n: (kinds[n], float((np.abs(v - expected[n]) / scale[n]).max())) for n, v in found.items()
            }
        if rank == 0:
            Path(folder, "told.json").write_text(json.dumps(told))
        dist.barrier()
    end_process()


def check_files(
    folder: Path,
    ours: GroupedCollection,
    model: nn.Module,
    case: Case,
    ranks: Ranks,
    found: Mapping[str, np.ndarray],
) -> None:
    """What is saved is read by as many ranks under another plan; rank 0 leaves the contents beside it."""
    if ranks.rank == 0:
        folder.mkdir()
        np.savez(folder.parent / "contents.npz", **found)
    ours.save_tables(folder)
    types = {**case.types, "few": "table_wise", "shops": "table_wise"}
    loaded = sharded(model, types, ranks)
    loaded.load_tables(folder)
    for other in (loaded, sharded(model, types, ranks, folder)):
        again = contents(other)
        for name, values in found.items():
            np.testing.assert_array_equal(again[name], values, err_msg=name)
