"""Prepares sharded tables: checks what plugins and the recipe ask for, and makes the plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from recpipe.common.meter import counting
from recpipe.distributed.ranks import Ranks
from recpipe.errors import UserError
from recpipe.tables.config import TierConfig
from recpipe.tables.groups import ModelTables
from recpipe.tables.owners import RESIDENT, GroupOwner
from recpipe.tables.sharding.claims import ShardClaims
from recpipe.tables.sharding.env import join_group
from recpipe.tables.sharding.plan import ShardPlan, load_plan
from recpipe.tables.sharding.planning import Sharding


@counting("planning the shards")
def plan_shards(
    tables: ModelTables,
    config: TierConfig,
    claims: ShardClaims,
    device: torch.device,
    batch_size: int,
    ranks: Ranks,
    world: int,
    owners: Sequence[GroupOwner] = (),
) -> tuple[Sharding, ShardPlan]:
    """Plan the places of the tables' parts on ``world`` ranks, without allocating them.

    All ranks call it. If ``world`` is not the number of running ranks, each plans alone. ``owners``: the
    owner of each group's resident rows; empty: all rows are resident.
    """
    if len(ranks.trainers) < ranks.world or len(ranks.holders) < ranks.world:
        raise UserError(
            "sharded tables lie on every rank that trains: leave topology.embedding_ranks and trainers null"
        )
    if config.kernel != "fused" and device.type != "cuda":
        raise UserError(
            f"tiers.kernel={config.kernel} needs a GPU, and this run is on a CPU: leave tiers.kernel=fused; "
            "tables larger than memory are what tiers.store=ssd with a caching policy is for"
        )
    tiered = [g for g, owner in zip(tables.groups, owners, strict=False) if owner.name != RESIDENT]
    sharding = Sharding(
        tables,
        claims,
        device,
        world,
        -(-batch_size // world),
        config.split_rows,
        config.kernel,
        config.budget(tables) / tables.total_bytes,
        frozenset(name for group in tiered for name in group.tables.layout.tables),
    )
    sharding.sharders()  # this refuses codecs that could not be carried out
    if config.plan is not None:
        plan = load_plan(Path(config.plan).expanduser())
        sharding.check(plan)
        return sharding, plan
    return sharding, sharding.plan(join_group(device, ranks) if world == ranks.world else None)
