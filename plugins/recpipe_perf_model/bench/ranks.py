"""What runs of several ranks take beside their own work, measured between processes of this machine.

    torchrun --standalone --nproc-per-node=2 -m recpipe_perf_model.bench.ranks FILE [--quick]

Each has one thread, as torchrun gives it. Messages go over the loopback device, which is no network: what a
network adds is for the prediction to say.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.common.console import log
from recpipe.plugin.bags import RowIds
from recpipe.plugin.tables import OPTIMIZERS
from recpipe.profiling.limits import Sample
from recpipe_perf_model.bench.lookups import OPTIMIZER, Clock, timed_lookups
from recpipe_perf_model.kernels.linear import COLLECTIVES

RANKS = 2
LIMIT = 120.0
"""Seconds after which the processes are ended; they take a tenth of that."""
COLLECTIVE_BYTES = (2**12, 2**16, 2**19, 2**22, 2**24)
"""Of collectives: what each rank gives."""
LEAST = 1e-6
"""Seconds that a collective is taken for that no clock could measure."""
TIMES = (1, 4, 12)
"""How often a piece of work runs side by side between two meetings."""
ROUNDS = 60
LEFT_OUT = 0.05
"""The share of the longest rounds that do not count: interrupts that no run of seconds would have."""
ROWS = 5_000
SHAPES = ((2, 16, 64, 1), (26, 16, 256, 1), (26, 16, 1024, 1), (26, 64, 512, 1), (8, 16, 512, 10))
"""Of sharded collections: tables, dimension, samples of each rank, and ids of a bag."""
SHARDED = ("sharded ids", "sharded forward", "sharded backward")
SHARDED_REPEATS = 12
SHARDED_LEAST = 1e-5
"""Seconds that a phase is taken for that is no slower than in one process."""
_OF_A_RUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def measure_ranks(quick: bool, ranks: int = RANKS) -> Iterator[Sample]:
    """Samples of collectives and of sharded steps between ``ranks`` new processes; none, with a warning,
    where they cannot be started."""
    with tempfile.TemporaryDirectory(prefix="recpipe-perf-") as folder:
        file = Path(folder) / "samples.json"
        start = f"-m torch.distributed.run --standalone --nproc-per-node={ranks} -m {__name__}"
        command = [sys.executable, *start.split(), str(file), *(["--quick"] if quick else [])]
        own = {key: value for key, value in os.environ.items() if key not in _OF_A_RUN}
        try:
            done = subprocess.run(
                command, env=own | {"OMP_NUM_THREADS": "1"}, capture_output=True, timeout=LIMIT, check=False
            )
        except subprocess.TimeoutExpired:
            log.warning("messages between ranks were not measured: it took more than %.0f s", LIMIT)
            return
        if done.returncode or not file.exists():
            said = done.stderr.decode(errors="replace").strip().splitlines()
            last = said[-1][:200] if said else "no output"
            log.warning("messages between ranks were not measured: %s", last)
            return
        for each in json.loads(file.read_text()):
            yield Sample(**each)


def main() -> None:
    """One of the processes."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    file, quick = Path(sys.argv[1]), "--quick" in sys.argv
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    found = list(measure_in(group, quick))
    if dist.get_rank() == 0:
        file.write_text(json.dumps([asdict(sample) for sample in found]))
    dist.destroy_process_group()


def measure_in(group: dist.ProcessGroup, quick: bool) -> Iterator[Sample]:
    """Samples of collectives, of work side by side, and of sharded steps. All ranks call this."""
    yield from _collectives(group, quick)
    yield from _side_by_side(group, quick)
    yield from _sharded(group, quick)


def _collectives(group: dist.ProcessGroup, quick: bool) -> Iterator[Sample]:
    """A sample for each collective and size, with the number of ranks, and one of the processor's time in it
    (``... busy``): means over the ranks."""
    for timed in timed_collectives(
        group, Clock(torch.device("cpu")), COLLECTIVE_BYTES[::2] if quick else COLLECTIVE_BYTES
    ):
        at: dict[str, float | str] = {"bytes": float(timed.bytes), "ranks": float(group.size())}
        at["threads"] = float(torch.get_num_threads())
        times = torch.tensor(timed.times)
        dist.all_reduce(times, group=group)
        elapsed, busy = (times / group.size() / 1e3).tolist()
        yield Sample(timed.collective, at, max(LEAST, elapsed))
        yield Sample(f"{timed.collective} busy", at, max(LEAST, busy))


@dataclass(frozen=True)
class TimedCollective:
    """One collective over all ranks, each with ``bytes`` of input: elapsed and busy milliseconds, medians."""

    collective: str
    bytes: int
    times: NDArray[np.float64]


def timed_collectives(
    group: dist.ProcessGroup, clock: Clock, sizes: tuple[int, ...] = COLLECTIVE_BYTES
) -> Iterator[TimedCollective]:
    """Time each collective at several sizes. Every rank of ``group`` must call this."""
    world = group.size()
    for name in COLLECTIVES:
        for size in sizes:
            count = size // 4 // world * world
            given = torch.zeros(count, device=clock.device)
            part = torch.empty(count // world, device=clock.device)
            times = []
            for _ in range(24 if size < 2**22 else 8):
                dist.barrier(group)
                before = clock.read()
                match name:
                    case "all_to_all":
                        dist.all_to_all_single(torch.empty_like(given), given, group=group)
                    case "reduce_scatter":
                        dist.reduce_scatter_tensor(part, given, group=group)
                    case "all_gather":
                        whole = torch.empty(count * world, device=clock.device)
                        dist.all_gather_into_tensor(whole, given, group=group)
                    case "all_reduce":
                        dist.all_reduce(given, group=group)
                times.append(clock.read() - before)
            yield TimedCollective(name, count * 4, np.median(times[3:], axis=0))


def _side_by_side(group: dist.ProcessGroup, quick: bool) -> Iterator[Sample]:
    """How much longer work takes on ranks side by side that wait for each other after it: cores that share
    their units and the memory, and the time until the slowest rank is there.

    A sample for each of ``TIMES``: work whose ``seconds`` are those of one rank while the others are idle,
    and its time if all ranks do it, until all have done it.
    """
    # About 0.2 ms of what a step does: a layer, a pass, random rows.
    rows, ids = torch.full((2**18, 32), 0.01), torch.randint(0, 2**18, (2_000,))
    values, weights = torch.full((256, 256), 0.01), torch.full((256, 256), 0.01)

    def work() -> object:
        return rows[ids].sum(), torch.relu(values @ weights).sum()

    rounds, meet = ROUNDS // 3 if quick else ROUNDS, partial(dist.barrier, group)
    meeting = _mean_seconds(work, 0, rounds, meet)
    for times in TIMES:
        meet()
        alone = _mean_seconds(work, times, rounds, lambda: None) if group.rank() == 0 else 0.0
        meet()
        together = _mean_seconds(work, times, rounds, meet)
        told = torch.tensor([alone, together - meeting], dtype=torch.float64)
        dist.broadcast(told, 0, group=group)
        seconds, elapsed = told.tolist()
        at: dict[str, float | str] = {"seconds": seconds, "ranks": float(group.size())}
        yield Sample("side by side", at, max(seconds, elapsed))


def _mean_seconds(work: Callable[[], object], times: int, rounds: int, meet: Callable[[], object]) -> float:
    """From one meeting to the next, between which ``work`` runs so many times."""
    found = []
    for _ in range(rounds):
        meet()
        began = time.perf_counter()
        for _ in range(times):
            work()
        meet()
        found.append(time.perf_counter() - began)
    return float(np.mean(sorted(found)[: max(1, int((1 - LEFT_OUT) * rounds))]))


def _sharded(group: dist.ProcessGroup, quick: bool) -> Iterator[Sample]:
    """Steps of TorchRec's sharded collections beyond their lookups: ids and rows go between ranks.

    Whole tables are spread over the ranks, one after the other, and every rank looks all of them up alike.
    What the same rank's tables would take in one process is subtracted. A sample of each of ``SHARDED`` for
    each shape, the mean of the ranks' medians.
    """
    clock, world = Clock(torch.device("cpu")), group.size()
    random = np.random.default_rng(group.rank())
    _sharded_ms(group, clock, random.integers(0, ROWS, 2**20), *SHAPES[0])  # the first makes connections
    for tables, dim, samples, ids in SHAPES[1:4:2] if quick else SHAPES:
        pool = random.integers(0, ROWS, 2**20)
        times = _sharded_ms(group, clock, pool, tables, dim, samples, ids)
        (alone,) = timed_lookups(
            clock,
            OPTIMIZERS[OPTIMIZER],
            {(ROWS, 0.0): pool},
            ((-(-tables // world), ROWS),),
            (dim,),
            ((samples * world, ids),),
            partial(dist.barrier, group),
            (0.0,),
        )
        more = torch.from_numpy(times - [0.0, alone.forward[0], alone.backward[0]])
        dist.all_reduce(more, group=group)
        sizes = {"tables": tables, "dim": dim, "samples": samples, "lookups": tables * samples * ids}
        at: dict[str, float | str] = {name: float(value) for name, value in sizes.items()}
        at |= {"ranks": float(world), "threads": float(torch.get_num_threads())}
        for kind, milliseconds in zip(SHARDED, (more / world).tolist(), strict=True):
            yield Sample(kind, at, max(SHARDED_LEAST, milliseconds / 1e3))
    gc.collect()  # sharded modules have reference cycles


def _sharded_ms(
    group: dist.ProcessGroup, clock: Clock, pool: RowIds, tables: int, dim: int, samples: int, ids: int
) -> NDArray[np.float64]:
    """Median elapsed milliseconds of sending ids, forward and backward."""
    names, world = [f"t{index}" for index in range(tables)], group.size()
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=ROWS, embedding_dim=dim, feature_names=[name])
        for name in names
    ]
    whole = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    fused = {"optimizer": OPTIMIZERS[OPTIMIZER], "learning_rate": 0.01}
    sharder = EmbeddingBagCollectionSharder(fused_params=fused)
    plan = construct_module_sharding_plan(
        whole,
        {name: table_wise(rank=n % world, compute_kernel="fused") for n, name in enumerate(names)},
        sharder=sharder,
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", world)),
        world_size=world,
        device_type="cpu",
    )
    module = sharder.shard(whole, plan, ShardingEnv.from_process_group(group), torch.device("cpu"))
    size = tables * samples * ids
    lengths = torch.full((tables * samples,), ids)
    times = []
    for step in range(SHARDED_REPEATS):
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


if __name__ == "__main__":
    main()
