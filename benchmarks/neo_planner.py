"""Predicted against measured: how good Neo's cost model is, and what its plan gains over TorchRec's.

    torchrun --nproc-per-node=2 benchmarks/neo_planner.py [--placements 12] [--rounds 7] [--batch 1024] ...

Steps of TorchRec's ShardedEmbeddingBagCollection (fused SGD) on a skewed set of tables: random placements and
those of the planners. A rank's time is the CPU time of its process. Predictions come from the machine's
micro-benchmarks and statistics of four other batches alone.
"""

from __future__ import annotations

import argparse
import logging
import random
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from recpipe_neo.estimate import CostModel, MeasuredEstimator, MeasuredStep, TableCosts
from recpipe_neo.planner import PlanRecord, load_or_measure, make_planner
from recpipe_neo.stats import FeatureStats, feature_stats
from recpipe_perf_model import zipf
from rich.console import Console
from rich.table import Table
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.planners import to_sharding_plan
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.types import ShardingOption
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.plugin.batch import Batch
from recpipe.tables.sharding.planning import TableSharder

TYPES = ["table_wise", "row_wise", "column_wise", "table_row_wise"]
FUSED = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.01}
STATS_SEED = 1_000_000
BATCHES = 48


@dataclass(frozen=True)
class BenchTable:
    """A table: its size, and how it is looked up."""

    name: str
    rows: int
    dim: int
    pooling: int


def table_set(count: int) -> list[BenchTable]:
    """Rows of 100 to 1M, 1 to 50 lookups per bag: few tables make most of the work."""
    draw = np.random.default_rng(5)
    rows = (10 ** draw.uniform(2, 6, count)).astype(int)
    pooling = np.clip(draw.lognormal(0.8, 1.4, count), 1, 50).astype(int)
    rows[0], pooling[0] = 1_000_000, 50
    return [BenchTable(f"t{i}", int(rows[i]), (64, 16)[i % 2], int(pooling[i])) for i in range(count)]


def batch(tables: Sequence[BenchTable], size: int, seed: int) -> KeyedJaggedTensor:
    """One rank's part of a global batch; Zipf ids with exponent 1.05."""
    draw = np.random.default_rng(seed)
    ids = [zipf(draw, table.rows, size * table.pooling, 1.05) for table in tables]
    lengths = torch.cat([torch.full((size,), table.pooling) for table in tables])
    return KeyedJaggedTensor([t.name for t in tables], torch.from_numpy(np.concatenate(ids)), lengths=lengths)


def sampled(tables: Sequence[BenchTable], size: int) -> dict[str, FeatureStats]:
    """Of four global batches that no step sees."""
    parts = [batch(tables, size, STATS_SEED + i) for i in range(4)]
    return feature_stats(Batch(torch.zeros(size, 1), part, torch.zeros(size)) for part in parts)


class Bench:
    """The tables on this rank's machine."""

    def __init__(self, tables: list[BenchTable], batch_size: int) -> None:
        self.tables = tables
        self.batch_size = batch_size
        self.world = dist.get_world_size()
        self.topology = Topology(self.world, "cpu", ddr_cap=2**34, local_world_size=self.world)
        self.holder = nn.Module()
        self.holder.tables = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[t.name]
                )
                for t in tables
            ],
            device=torch.device("meta"),
        )
        self.batches = [batch(tables, batch_size, i * self.world + dist.get_rank()) for i in range(BATCHES)]
        self.step = 0

    def constraints(self, pooling: bool = False) -> dict[str, ParameterConstraints]:
        """Every type that trains the tables alike."""
        return {
            t.name: ParameterConstraints(
                sharding_types=TYPES,
                compute_kernels=["fused"],
                min_partition=max(4, t.dim // self.world),
                pooling_factors=[float(t.pooling)] if pooling else [1.0],
            )
            for t in self.tables
        }

    def sharded(self, plan: ShardingPlan) -> nn.Module:
        """The collection in the places of ``plan``."""
        env = ShardingEnv.from_process_group(dist.group.WORLD)
        sharder = TableSharder(fused_params=FUSED)
        module = sharder.shard(self.holder.tables, plan.plan["tables"], env, torch.device("cpu"))
        for weight in module.state_dict().values():
            for shard in weight.local_shards():
                shard.tensor.detach().uniform_(-0.01, 0.01)
        return module

    def steps(self, module: nn.Module, count: int) -> tuple[npt.NDArray[np.float64], float]:
        """Median CPU ms of a step on each rank, and elapsed ms per step."""
        cpu = []
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(count):
            part = self.batches[self.step % BATCHES]
            self.step += 1
            before = time.process_time()
            pooled = module(part).wait().values()
            pooled.backward(pooled.detach())
            cpu.append(time.process_time() - before)
        dist.barrier()
        elapsed = (time.perf_counter() - begin) / count * 1e3
        mine = torch.zeros(self.world, dtype=torch.float64)
        mine[dist.get_rank()] = float(np.median(cpu)) * 1e3
        dist.all_reduce(mine)
        return mine.numpy(), elapsed


def random_placements(space: list[ShardingOption], count: int, world: int) -> Iterator[list[ShardingOption]]:
    """Types and ranks at random, from all tables whole to none, and from even to lopsided."""
    draw = random.Random(11)
    tables: dict[str, dict[str, ShardingOption]] = {}
    for option in space:
        tables.setdefault(option.name, {})[option.sharding_type] = option
    for index in range(count):
        whole, lopsided = index / (count - 1), draw.random()
        plan = []
        for options in tables.values():
            kind = "table_wise" if draw.random() < whole else draw.choice(TYPES)
            option = options[kind]
            for number, shard in enumerate(option.shards):
                free = kind in ("table_wise", "column_wise")
                shard.rank = number % world
                if free:
                    shard.rank = 0 if draw.random() < lopsided / 2 else draw.randrange(world)
            plan.append(option)
        yield plan


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Correlation of the ranks."""
    ranks = [np.argsort(np.argsort(values)) for values in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--placements", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--tables", type=int, default=20)
    parser.add_argument("--batch", type=int, default=1024, help="samples of each rank")
    parser.add_argument("--profile-dir", type=Path, help="measured anew without one")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        run(arguments, arguments.profile_dir or Path(folder))
    dist.destroy_process_group()


def run(arguments: argparse.Namespace, profile_dir: Path) -> None:
    tables = table_set(arguments.tables)
    bench = Bench(tables, arguments.batch)
    group = dist.group.WORLD
    assert group is not None
    begin = time.perf_counter()
    profile = load_or_measure(profile_dir, group, torch.device("cpu"), EmbOptimType.EXACT_SGD)
    console = Console(quiet=dist.get_rank() != 0, width=130)
    console.print(f"profile in {time.perf_counter() - begin:.1f} s: {profile.machine}")
    stats = sampled(tables, arguments.batch * bench.world)
    costs = TableCosts(CostModel(profile), stats, bench.topology)
    model = MeasuredStep(costs)
    constraints = bench.constraints()
    estimators = [MeasuredEstimator(bench.topology, costs=costs), EmbeddingStorageEstimator(bench.topology)]
    enumerator = EmbeddingEnumerator(bench.topology, arguments.batch, constraints, estimators)
    space = enumerator.enumerate(bench.holder, [TableSharder(fused_params=FUSED)])
    accuracy(console, bench, model, space, arguments)
    compare(console, bench, stats, profile_dir, arguments)


def accuracy(
    console: Console, bench: Bench, model: MeasuredStep, space: list[ShardingOption], arguments: Any
) -> None:
    """Random placements: each rank's CPU time and the step, beside the prediction."""
    plans = []
    for plan in random_placements(space, arguments.placements, bench.world):
        module = bench.sharded(to_sharding_plan(plan, bench.topology))
        types = " ".join(
            f"{sum(o.sharding_type == t for o in plan)} {''.join(w[0] for w in t.split('_'))}" for t in TYPES
        )
        plans.append((module, types, model.busy(plan).sum(axis=1), model.rate(plan)))
    rounds = []
    for _ in range(arguments.rounds + 1):
        rounds.append([bench.steps(module, arguments.steps) for module, *_ in plans])
    shown = Table(
        "placement", "types", "rank", "predicted ms", "measured ms", "error", "step predicted", "step"
    )
    busy: list[tuple[float, float]] = []
    steps: list[tuple[float, float]] = []
    for number, (_, types, predicted, step) in enumerate(plans):
        # The machine is shared: the least disturbed round counts, as in the micro-benchmarks.
        measured = np.min([results[number][0] for results in rounds[1:]], axis=0)
        elapsed = min(results[number][1] for results in rounds[1:])
        steps.append((step, elapsed))
        for rank, (ours, theirs) in enumerate(zip(predicted, measured, strict=True)):
            busy.append((ours, theirs))
            first = (str(number), types) if rank == 0 else ("", "")
            last = (f"{step:.2f}", f"{elapsed:.2f}") if rank == 0 else ("", "")
            shown.add_row(
                *first, str(rank), f"{ours:.2f}", f"{theirs:.2f}", f"{ours / theirs - 1:+.0%}", *last
            )
    console.print(shown)
    for name, pairs in (("rank's CPU time", busy), ("step", steps)):
        ours, theirs = (list(side) for side in zip(*pairs, strict=True))
        errors = np.abs(np.divide(ours, theirs) - 1)
        console.print(
            f"{name}: rank correlation {spearman(ours, theirs):.3f}, "
            f"median error {np.median(errors):.1%}, largest {errors.max():.1%}, {len(pairs)} values"
        )


def compare(
    console: Console, bench: Bench, stats: dict[str, FeatureStats], profile_dir: Path, arguments: Any
) -> None:
    """The planners' plans in turn, ``rounds`` times."""
    plans = {}
    ours = TableSharder
    for name in ("torchrec", "torchrec, pooling", "greedy", "karmarkar_karp", "measured"):
        kind, default = name.partition(",")[0], name.startswith("torchrec")
        sharder = (EmbeddingBagCollectionSharder if default else ours)(fused_params=FUSED)
        record = PlanRecord()
        planner = make_planner(
            kind,
            bench.topology,
            bench.constraints(pooling=name.endswith("pooling")),
            arguments.batch,
            stats,
            profile_dir,
            record,
        )
        plan = planner.collective_plan(bench.holder, [sharder], dist.group.WORLD)
        plans[name] = (bench.sharded(plan), record)
    times: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(arguments.rounds + 1):
        for name, (module, _) in plans.items():
            times[name].append(bench.steps(module, arguments.steps)[1])
    base = np.array(times["torchrec"][1:])
    shown = Table("planner", "types", "predicted ms", "step ms", "min", "max", "torchrec / this", "per round")
    for name, (_, record) in plans.items():
        mine = np.array(times[name][1:])
        ratios = base / mine
        kinds = list(record.sharding.values())
        types = " ".join(
            f"{kinds.count(t)} {''.join(w[0] for w in t.split('_'))}" for t in dict.fromkeys(kinds)
        )
        step = f"{record.step_ms:.2f}" if name == "measured" and record.step_ms else "-"
        shown.add_row(
            name, types, step, f"{np.median(mine):.2f}", f"{mine.min():.2f}", f"{mine.max():.2f}",
            f"{np.median(ratios):.2f}", f"{ratios.min():.2f} .. {ratios.max():.2f}",
        )  # fmt: skip
    console.print(shown)


if __name__ == "__main__":
    main()
