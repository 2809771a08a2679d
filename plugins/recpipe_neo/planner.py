"""Provisional."""

from __future__ import annotations

from typing import Any

from torchrec.distributed.planner import EmbeddingShardingPlanner

PLANNERS = ("torchrec", "measured")


def make_planner(kind: str, ctx: Any, cache: Any, topology: Any, constraints: Any) -> Any:
    return EmbeddingShardingPlanner(
        topology=topology, constraints=constraints, batch_size=-(-ctx.batch_size // topology.world_size)
    )
