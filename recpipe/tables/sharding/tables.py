"""All of a model's tables, cut into parts over the ranks by a plan and run by TorchRec's
``DistributedModelParallel``."""

from __future__ import annotations

import atexit
import gc
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.comm_ops import set_gradient_division
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe import seams
from recpipe.distributed.ranks import Channel, Ranks, backends
from recpipe.errors import DataError
from recpipe.tables.sharding.collection import ShardedCollection
from recpipe.tables.sharding.modules import groups_in, module_paths, skeleton
from recpipe.tables.sharding.plan import ShardPlan
from recpipe.tables.sharding.planning import Sharding
from recpipe.tables.sharding.tiered import ShardTiers


class ShardedTables:
    """All sharded tables of a model: a collection for each group, and what the collections share.

    One ``DistributedModelParallel`` shards all groups' modules at their places in the model, by one plan.
    Gradients are summed over the ranks, not averaged, since each rank's loss is its part of the whole batch's
    loss.
    """

    def __init__(
        self,
        sharding: Sharding,
        plan: ShardPlan,
        ranks: Ranks,
        model: nn.Module | None = None,
        tiers: ShardTiers | None = None,
        saved: Path | None = None,
    ) -> None:
        """``model`` holds the collections and is unchanged afterwards; None: only the tables are needed.

        ``tiers``: the tiers that hold the rows of the tables in ``sharding.tiered``. ``saved``: a
        checkpoint's tables, whose rows all tables start with; None: first values.
        """
        self.sharding, self.plan, self.rank = sharding, plan, ranks.rank
        self.saved = saved
        """The safetensors files from which memory that has their layout is read at once."""
        self.group = join_group(sharding.device, ranks)
        set_gradient_division(False)
        self.collectives = seams.count_collectives()
        """TorchRec's collectives on this rank so far, by name."""
        on_gpu = sharding.device.type == "cuda"
        self.stream = torch.cuda.Stream(sharding.device) if on_gpu else None  # type: ignore[no-untyped-call]
        """The CUDA stream on which ids are sent, beside the training's kernels."""
        self.prefetches = sharding.kernel == "uvm_caching"
        # How many random numbers the shards' first values take depends on the plan; what follows must not.
        with torch.random.fork_rng(devices=[sharding.device] if on_gpu else []):
            modules = self._sharded(model)
        self.channel: Channel = ranks.channel()
        self._gradients: Channel = ranks.channel()
        for module, group in zip(modules, sharding.tables.groups, strict=True):
            for lookup in seams.replicated_lookups(module):
                lookup.register_comm_hook(self._gradients, lambda channel, bucket: _summed(channel, bucket))
                if not group.tables.pooled and not on_gpu:
                    seams.look_up_each_id(lookup)
        self.collections = tuple(
            ShardedCollection(self, number, module, tiers) for number, module in enumerate(modules)
        )
        """The collection of each group."""

    def _sharded(self, model: nn.Module | None) -> list[Any]:
        """The sharded TorchRec module of each group."""
        sharding, tables = self.sharding, self.sharding.tables
        whole = skeleton(tables) if model is None else model
        local_world = sharding.topology().local_world_size
        limits = sharding.constraints()
        with nullcontext() if model is None else groups_in(whole, tables), seams.own_lookups():
            # DistributedModelParallel must leave the dense part alone: recpipe sums its gradients in the
            # ranks' order.
            DistributedModelParallel(
                whole,
                env=ShardingEnv.from_process_group(self.group),
                device=sharding.device,
                plan=self.plan.torchrec(sharding.device, local_world, limits, tables, sharding.tiered),
                sharders=sharding.sharders(),
                init_data_parallel=False,
                init_parameters=False,
            )
            return [whole.get_submodule(path) for path in module_paths(tables)]

    def given(self, sparse: KeyedJaggedTensor, weighted: bool) -> KeyedJaggedTensor:
        """``sparse`` as the sharded modules take it: weights are dropped where they have no effect, and empty
        samples are appended so that all ranks send shares of one size.

        TorchRec's row-wise collectives need equal sizes under gloo. An empty sample's gradient is zero.
        """
        size, full = sparse.stride(), self.sharding.rank_batch
        weights = sparse.weights() if weighted else None
        if size == full or self.plan.world == 1:
            if weighted or sparse.weights_or_none() is None:
                return sparse
            return KeyedJaggedTensor(sparse.keys(), sparse.values(), lengths=sparse.lengths())
        if size > full:
            raise DataError(
                f"a share of {size} samples, but tables sharded over ranks were built for {full} "
                "(data.batch_size over the ranks): no plugin may make batches larger"
            )
        lengths = sparse.lengths().view(len(sparse.keys()), size)
        lengths = torch.nn.functional.pad(lengths, (0, full - size)).view(-1)
        return KeyedJaggedTensor(sparse.keys(), sparse.values(), weights, lengths=lengths)


def _summed(gradients: Channel, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Sum data-parallel tables' gradients in the order of the ranks.

    DistributedDataParallel's own all-reduce adds in an order that depends on its buckets, which depend on how
    long the process has run. A restarted run would then not have the bits of an undisturbed one.
    """
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(gradients.ordered_sum(bucket.buffer()))
    return done


def join_group(device: torch.device, ranks: Ranks) -> dist.ProcessGroup:
    """The run's process group for TorchRec's collectives alone, also if there is only one process."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backends(device), store=store, rank=0, world_size=1)
        if device.type == "cuda":
            atexit.register(_end_group)
    if backend not in ranks.groups:
        ranks.groups[backend] = dist.new_group(list(range(ranks.world)), backend=backend)
    group: dist.ProcessGroup = ranks.groups[backend]
    return group


def _end_group() -> None:
    """End a single process's group at its exit: a model that a caller keeps may use it until then, and NCCL
    warns of a group that nobody has ended."""
    gc.collect()  # sharded modules have reference cycles, and are not to outlive their group
    if dist.is_initialized():
        dist.destroy_process_group()
