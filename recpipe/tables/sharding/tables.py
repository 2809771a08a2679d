"""All of a model's tables, cut into parts over the ranks by a plan and run by TorchRec's
``DistributedModelParallel``."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchrec.distributed.comm_ops import set_gradient_division
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv

from recpipe import private_api
from recpipe.distributed.ranks import Channel, Ranks
from recpipe.tables.sharding.files import ShardedGroup
from recpipe.tables.sharding.modules import groups_in, module_paths, skeleton
from recpipe.tables.sharding.plan import ShardPlan
from recpipe.tables.sharding.planning import Sharding
from recpipe.tables.sharding.sent import ShardEnv
from recpipe.tables.sharding.tiered import ShardTiers


def shard_tables(
    sharding: Sharding,
    plan: ShardPlan,
    ranks: Ranks,
    model: nn.Module | None = None,
    tiers: ShardTiers | None = None,
    saved: Path | None = None,
) -> tuple[ShardedGroup, ...]:
    """Shard all tables of a model, and return the collection of each group.

    One ``DistributedModelParallel`` shards all groups' modules at their places in the model, by one plan.
    Gradients are summed over the ranks, not averaged, since each rank's loss is its part of the whole batch's
    loss.

    ``model`` holds the collections and is unchanged afterwards; None: only the tables are needed. ``tiers``:
    the tiers that hold the rows of the tables in ``sharding.tiered``. ``saved``: a checkpoint's tables, whose
    rows all tables start with; None: first values.
    """
    env, tables, on_gpu = ShardEnv(sharding, plan, ranks), sharding.tables, sharding.device.type == "cuda"
    set_gradient_division(False)
    # How many random numbers the shards' first values take depends on the plan; what follows must not.
    with torch.random.fork_rng(devices=[sharding.device] if on_gpu else []):
        whole = skeleton(tables) if model is None else model
        local_world, limits = sharding.topology().local_world_size, sharding.constraints()
        with nullcontext() if model is None else groups_in(whole, tables), private_api.own_lookups():
            # DistributedModelParallel must leave the dense part alone: recpipe sums its gradients in the
            # ranks' order.
            DistributedModelParallel(
                whole,
                env=ShardingEnv.from_process_group(env.group),
                device=sharding.device,
                plan=plan.torchrec(sharding.device, local_world, limits, tables, sharding.tiered),
                sharders=sharding.sharders(),
                init_data_parallel=False,
                init_parameters=False,
            )
            modules = [whole.get_submodule(path) for path in module_paths(tables)]
    gradients = ranks.channel()
    for module, group in zip(modules, tables.groups, strict=True):
        for lookup in private_api.replicated_lookups(module):
            lookup.register_comm_hook(gradients, lambda channel, bucket: _summed(channel, bucket))
            if not group.tables.pooled and not on_gpu:
                private_api.look_up_each_id(lookup)
    return tuple(ShardedGroup(env, number, module, tiers, saved) for number, module in enumerate(modules))


def _summed(gradients: Channel, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Sum data-parallel tables' gradients in the order of the ranks.

    DistributedDataParallel's own all-reduce adds in an order that depends on its buckets, which depend on how
    long the process has run. A restarted run would then not have the bits of an undisturbed one.
    """
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(gradients.ordered_sum(bucket.buffer()))
    return done
