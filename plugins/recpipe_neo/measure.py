"""Micro-benchmarks of this machine: lookups, collectives, and steps of small sharded collections.

All ranks run the same benchmark at the same time, after a barrier, so that it includes contention for cores
and memory. On a CPU a rank's time is its process's CPU time, since waiting for others is not work. On CUDA it
is elapsed time. Lookups and collectives are those of recpipe's machine profile.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from recpipe_perf_model import (
    COLLECTIVE_BYTES,
    LOOKUP_SHAPES,
    LOOKUP_TABLES,
    Clock,
    id_pools,
    timed_collectives,
    timed_lookups,
)
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingType
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe_neo.machine_profile import (
    CollectiveSample,
    ExchangeSample,
    LookupSample,
    Machine,
    MachineProfile,
)

PASSES = 2
"""Passes over all benchmarks. The faster time counts, since other programs may disturb for seconds."""
PASS_SECONDS = 15.0
"""A pass that took longer is the last one: ranks that share few cores take turns, which evens times out."""


def measure(
    group: dist.ProcessGroup, device: torch.device, optimizer: EmbOptimType, collectives_known: bool = False
) -> MachineProfile:
    """Run all benchmarks. Every rank of ``group`` must call this and gets the same profile.

    ``optimizer``: the tables' fused optimizer. ``collectives_known``: leave collectives out. A time is the
    median of a few repetitions, then the mean over the ranks, then the minimum over the passes; there is one
    pass where that took longer than ``PASS_SECONDS``.
    """
    clock = Clock(device)
    pools = id_pools(np.random.default_rng(group.rank()), [rows for _, rows in LOOKUP_TABLES])
    passes: list[MachineProfile] = []
    begun = perf_counter()
    while len(passes) < PASSES and not (passes and _late(group, clock, perf_counter() - begun)):
        passes.append(
            MachineProfile(
                Machine.current(group, device, optimizer),
                list(measure_lookups(group, clock, optimizer, pools)),
                [] if collectives_known else list(measure_collectives(group, clock)),
                list(measure_exchanges(group, clock, optimizer)),
            )
        )
    return MachineProfile.least(passes)


def measure_lookups(
    group: dist.ProcessGroup,
    clock: Clock,
    optimizer: EmbOptimType,
    pools: Mapping[tuple[int, float], npt.NDArray[np.int64]],
) -> Iterator[LookupSample]:
    """Measure forward, and backward with update, of TBEs; ``pools``: ids by rows and skew."""
    begin = partial(dist.barrier, group)
    for timed in timed_lookups(clock, optimizer, pools, LOOKUP_TABLES, shapes=LOOKUP_SHAPES, begin=begin):
        busy = [timed.forward[1], timed.backward[1], timed.distinct]
        forward, backward, distinct = _mean(group, clock, busy)
        yield LookupSample(
            timed.tables, timed.rows, timed.dim, timed.bags, timed.lookups, distinct, forward, backward
        )


def measure_collectives(group: dist.ProcessGroup, clock: Clock) -> Iterator[CollectiveSample]:
    """Measure each collective at several sizes."""
    for timed in timed_collectives(group, clock, COLLECTIVE_BYTES):
        elapsed, busy = _mean(group, clock, timed.times)
        yield CollectiveSample(timed.collective, timed.bytes, elapsed, busy)


def _late(group: dist.ProcessGroup, clock: Clock, seconds: float) -> bool:
    """Whether a pass took too long on any rank."""
    longest = torch.tensor([seconds], dtype=torch.float64, device=clock.device)
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
    return float(longest) > PASS_SECONDS


def _mean(
    group: dist.ProcessGroup, clock: Clock, values: npt.NDArray[np.float64] | list[float]
) -> list[float]:
    """The mean over the ranks."""
    total = torch.tensor(values, dtype=torch.float64, device=clock.device)
    dist.all_reduce(total, group=group)
    mean: list[float] = (total / group.size()).tolist()
    return mean


GENERATORS = {
    ShardingType.TABLE_WISE.value: table_wise(rank=0, compute_kernel="fused"),
    ShardingType.COLUMN_WISE.value: column_wise(ranks=[0, 0], compute_kernel="fused"),
    ShardingType.ROW_WISE.value: row_wise(compute_kernel="fused"),
    ShardingType.TABLE_ROW_WISE.value: table_row_wise(host_index=0),
    ShardingType.DATA_PARALLEL.value: data_parallel(),
}
"""Placements in which all rows that are looked up are on rank 0."""


SHAPES = (
    (1, 1_000, 16, 64, 1),
    (8, 1_000, 64, 1024, 1),
    (8, 1_000, 16, 1024, 10),
    (8, 20_000, 64, 256, 1),
    (8, 1_000, 16, 64, 1),
    (8, 1_000, 16, 1024, 1),
)
"""The grid: tables, rows, dim, samples of each rank, lookups per bag. The first ``NEEDED`` differ in all of
them, which is what a fit needs."""


NEEDED = 4


LAST_SECONDS = 30.0
"""Seconds after which no other shapes than those are measured."""


REPEATS, FEWER = 8, 4
"""Steps of each, of which the first two are left out; fewer after ``SLOW_SECONDS``, as with many ranks on few
cores."""


SLOW_SECONDS = 10.0


def measure_exchanges(
    group: dist.ProcessGroup, clock: Clock, optimizer: EmbOptimType
) -> Iterator[ExchangeSample]:
    """Measure steps of each sharding type: the busy time of rank 0, and the mean busy time of the others.
    Ranks that are slow, as many on few cores are, measure fewer shapes."""
    begun, seconds = perf_counter(), 0.0
    for number, shape in enumerate(SHAPES):
        if number >= NEEDED and seconds > LAST_SECONDS:
            break
        for kind in GENERATORS:
            repeats = REPEATS if seconds < SLOW_SECONDS else FEWER
            mine = torch.zeros(3, 4, dtype=torch.float64, device=clock.device)
            part = 0 if group.rank() == 0 else 1
            mine[part, 0] = 1
            mine[part, 1:] = torch.from_numpy(_step(group, clock, optimizer, kind, shape, repeats))
            mine[2, 0] = perf_counter() - begun
            dist.all_reduce(mine, group=group)
            # The mean over the ranks, which decide alike.
            seconds = float(mine[2, 0]) / group.size()
            tables, rows, dim, samples, pooling = shape
            columns = 2 if kind == ShardingType.COLUMN_WISE.value else 1
            for owns, (ranks, *total) in zip((True, False), mine[:2].tolist(), strict=True):
                if ranks:
                    times = [time / ranks for time in total]
                    yield ExchangeSample(
                        kind, owns, tables, rows, dim, columns, samples, samples * pooling, *times
                    )
    # Sharded modules have reference cycles. One with a DistributedDataParallel inside that outlives the
    # process group can abort the process at its exit.
    gc.collect()


def _step(
    group: dist.ProcessGroup,
    clock: Clock,
    optimizer: EmbOptimType,
    kind: str,
    shape: tuple[int, int, int, int, int],
    repeats: int,
) -> npt.NDArray[np.float64]:
    """Median busy ms of input dist, forward and backward."""
    tables, rows, dim, samples, pooling = shape
    names = [f"t{index}" for index in range(tables)]
    module = _sharded(group, clock.device, optimizer, kind, names, (rows, dim))
    dense = [p for p in module.parameters() if kind == ShardingType.DATA_PARALLEL.value]
    random = torch.Generator().manual_seed(group.rank())
    lengths = torch.full((tables * samples,), pooling, device=clock.device)
    times = []
    for _ in range(repeats):
        # The first block of rows, which rank 0 holds.
        ids = torch.randint(rows // group.size(), (tables * samples * pooling,), generator=random)
        batch = KeyedJaggedTensor(keys=names, values=ids.to(clock.device), lengths=lengths)
        dist.barrier(group)
        begin = clock.start()
        context = module.create_context()
        received = module.input_dist(context, batch).wait().wait()
        ends = [clock.read() - begin]
        begin = clock.start()
        pooled = module.compute_and_output_dist(context, received).wait().values()
        ends.append(clock.read() - begin)
        begin = clock.start()
        pooled.backward(pooled.detach())
        for parameter in dense:
            if parameter.grad is not None:  # the update of all rows; fused optimizers do not need it
                parameter.data.add_(parameter.grad, alpha=-0.01)
                parameter.grad = None
        ends.append(clock.read() - begin)
        times.append([busy for _, busy in ends])
    return np.asarray(np.median(times[2:], axis=0))


def _sharded(
    group: dist.ProcessGroup,
    device: torch.device,
    optimizer: EmbOptimType,
    kind: str,
    names: list[str],
    size: tuple[int, int],
) -> ShardedEmbeddingBagCollection:
    rows, dim = size
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[name])
        for name in names
    ]
    tables = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    sharder = EmbeddingBagCollectionSharder(fused_params={"optimizer": optimizer, "learning_rate": 0.01})
    plan = construct_module_sharding_plan(
        tables,
        dict.fromkeys(names, GENERATORS[kind]),
        sharder=sharder,
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", group.size())),
        world_size=group.size(),
        device_type=device.type,
    )
    if kind == ShardingType.TABLE_ROW_WISE.value:  # TorchRec's generator takes no kernel and sets a dense one
        for parameter in plan.values():
            parameter.compute_kernel = "fused"
    if group.size() == 1:
        for parameter in plan.values():
            _put_on(parameter, device)
    return sharder.shard(tables, plan, ShardingEnv.from_process_group(group), device)


def _put_on(parameter: ParameterSharding, device: torch.device) -> None:
    """Place the shards of a single process on ``device``, which need not be the first GPU."""
    spec: Any = parameter.sharding_spec  # None if the table is data-parallel
    if spec is not None:
        spec.shards = [type(s)(s.shard_offsets, s.shard_sizes, f"rank:0/{device}") for s in spec.shards]
