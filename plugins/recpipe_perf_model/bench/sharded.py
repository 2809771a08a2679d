"""Steps of TorchRec's sharded collections beyond their lookups: ids and rows go between ranks.

Whole tables are spread over the ranks, one after the other, and every rank looks all of them up alike. What
the same rank's tables would take in one process is subtracted.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.plugin.tables import OPTIMIZERS
from recpipe.profiling.limits import Sample
from recpipe_perf_model.bench.lookups import OPTIMIZER, Clock, timed_lookups

ROWS = 5_000
SHAPES = ((2, 16, 64, 1), (26, 16, 256, 1), (26, 16, 1024, 1), (26, 64, 512, 1), (8, 16, 512, 10))
"""Tables, dimension, samples of each rank, and ids of a bag."""
KINDS = ("sharded ids", "sharded forward", "sharded backward")
REPEATS = 12
LEAST = 1e-5
"""Seconds that a phase is taken for that is no slower than in one process."""


def measure(group: dist.ProcessGroup, quick: bool) -> Iterator[Sample]:
    """A sample of each of ``KINDS`` for each shape, the mean of the ranks' medians. All ranks call this."""
    clock, world = Clock(torch.device("cpu")), group.size()
    random = np.random.default_rng(group.rank())
    _sharded_ms(group, clock, random.integers(0, ROWS, 2**20), SHAPES[0])  # the first step makes connections
    for tables, dim, samples, ids in SHAPES[1:4:2] if quick else SHAPES:
        pool = random.integers(0, ROWS, 2**20)
        times = _sharded_ms(group, clock, pool, (tables, dim, samples, ids))
        own = -(-tables // world)
        (alone,) = timed_lookups(
            clock,
            OPTIMIZERS[OPTIMIZER],
            {(ROWS, 0.0): pool},
            ((own, ROWS),),
            (dim,),
            ((samples * world, ids),),
            lambda: dist.barrier(group),
            (0.0,),
        )
        more = torch.from_numpy(times - [0.0, alone.forward[0], alone.backward[0]])
        dist.all_reduce(more, group=group)
        sizes = {"tables": tables, "dim": dim, "samples": samples, "lookups": tables * samples * ids}
        at: dict[str, float | str] = {name: float(value) for name, value in sizes.items()}
        at |= {"ranks": float(world), "threads": float(torch.get_num_threads())}
        for kind, milliseconds in zip(KINDS, (more / world).tolist(), strict=True):
            yield Sample(kind, at, max(LEAST, milliseconds / 1e3))
    gc.collect()  # sharded modules have reference cycles


def _sharded_ms(
    group: dist.ProcessGroup, clock: Clock, pool: NDArray[np.int64], shape: tuple[int, int, int, int]
) -> NDArray[np.float64]:
    """Median elapsed milliseconds of sending ids, forward and backward."""
    tables, dim, samples, ids = shape
    names = [f"t{index}" for index in range(tables)]
    module = _made(group, names, dim)
    size = tables * samples * ids
    lengths = torch.full((tables * samples,), ids)
    times = []
    for step in range(REPEATS):
        start = step * size % (len(pool) - size + 1)
        batch = KeyedJaggedTensor(names, torch.from_numpy(pool[start : start + size]), lengths=lengths)
        dist.barrier(group)
        marks = [clock.start()[0]]
        context = module.create_context()
        received = module.input_dist(context, batch).wait().wait()
        marks.append(clock.read()[0])
        pooled = module.compute_and_output_dist(context, received).wait().values()
        marks.append(clock.read()[0])
        pooled.backward(pooled.detach())
        marks.append(clock.read()[0])
        times.append(np.diff(marks))
    return np.asarray(np.median(times[2:], axis=0))


def _made(group: dist.ProcessGroup, names: list[str], dim: int) -> ShardedEmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=ROWS, embedding_dim=dim, feature_names=[name])
        for name in names
    ]
    tables = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    sharder = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": OPTIMIZERS[OPTIMIZER], "learning_rate": 0.01}
    )
    world = group.size()
    plan = construct_module_sharding_plan(
        tables,
        {name: table_wise(rank=n % world, compute_kernel="fused") for n, name in enumerate(names)},
        sharder=sharder,
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", world)),
        world_size=world,
        device_type="cpu",
    )
    return sharder.shard(tables, plan, ShardingEnv.from_process_group(group), torch.device("cpu"))
