"""One lookup and one update over two ranks in lower precisions, in processes of their own."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from recpipe_neo.plugin import LowPrecision

from recpipe.distributed.ranks import join_group
from recpipe.plugin.api import Contribution
from recpipe.plugin.assembly import assemble
from recpipe.plugin.calls import Origin
from recpipe.plugin.context import TableInfo
from recpipe.tables.groups import ModelTables
from recpipe.tables.resident import ResidentCollection
from recpipe.tables.sharding.claims import ShardClaims
from recpipe.tables.sharding.planning import Sharding
from recpipe.tables.sharding.tables import shard_tables
from tests.ranks import joined
from tests.tables.samples import CPU
from tests.tables.sharded import (
    DIM,
    FEATURES,
    SIZE,
    Places,
    batches,
    contents,
    part,
    ranks_of,
    table_set,
    train,
)

SEQUENCE = "sequence "
"""In front of the sharding type of tables whose rows are not pooled."""


class Coded(Places):
    def __init__(self, kind: str, wire: tuple[str, str]) -> None:
        super().__init__({"*": kind.removeprefix(SEQUENCE)})
        self.wire, self.pooled = wire, not kind.startswith(SEQUENCE)

    def contribute(self, ctx) -> Contribution:
        quantizer = LowPrecision("fp32", self.wire, [self.pooled])
        return Contribution(planner=super().contribute(ctx).planner, quantizer=quantizer)


def claims(kind: str, wire: tuple[str, str]) -> ShardClaims:
    plugin = Coded(kind, wire)
    info = {f.name: TableInfo(f.name, f.rows, DIM) for f in FEATURES}
    made = [(Origin("coded"), plugin, plugin.contribute(None))]
    return ShardClaims.of(assemble(made, info, prefer={}))


def process(rank: int, world: int, folder: str, cases: list[tuple[str, str, str]]) -> None:
    """Rank 0 writes, by case: the largest pooled value, the largest errors of pooled rows and of updated
    weights, the largest update, and the bytes sent."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    with joined(rank, world, str(Path(folder, "meet"))):
        ranks, told = ranks_of(rank, world), {}
        sparse = batches(2)[0]
        mine = ranks.shares(0, sparse.stride())[rank]
        for kind, *wire in cases:
            pooled = not kind.startswith(SEQUENCE)
            tables = replace(table_set("sgd"), pooled=pooled)
            parts = claims(kind, (wire[0], wire[1]))
            size = -(-SIZE // world)
            sharding = Sharding(ModelTables.single(tables), parts, CPU, world, size, False, "fused", 1.0)
            plan = sharding.plan(join_group(CPU, ranks))
            (sharded,) = shard_tables(sharding, plan, ranks)
            whole = ResidentCollection(tables, CPU)
            share = part(sparse, mine.start, mine.stop)
            with torch.no_grad():
                ours, theirs = sharded.lookup(share), whole.lookup(share)
            error, largest = float((ours - theirs).abs().max()), float(theirs.abs().max())
            before = contents(whole)
            if pooled:
                train(sharded, share, mine.start, sparse.stride())
                train(whole, sparse, 0, sparse.stride())
            else:
                for tables_of, given in ((sharded, share), (whole, sparse)):
                    ((tables_of.lookup(given) + 1).square() / sparse.stride()).sum().backward()
            after, expected = contents(sharded), contents(whole)
            told[" ".join((kind, *wire))] = {
                "largest": largest,
                "error": error,
                "update": max(float(np.abs(expected[n][0] - before[n][0]).max()) for n in before),
                "update_error": max(float(np.abs(expected[n][0] - after[n][0]).max()) for n in before),
                "bytes": sum(c.bytes_sent for c in sharded.collectives.values()),
            }
        if rank == 0:
            Path(folder, "told.json").write_text(json.dumps(told))
