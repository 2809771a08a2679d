"""Sharded tables on 1, 2 and 4 ranks: what recpipe costs over a DistributedModelParallel loop written by
hand, and what sharding types and planners do.

    python benchmarks/sharding.py [--repetitions 5] [--ranks 1 2 4] [--samples 300000]
        [--model small|tiny] [--rows ROW ...] [--json FILE]

All sides train the same DLRM on the same batches of the same files, in turn, each in processes of its own
that torchrun starts. ``by hand`` is TorchRec's default planner and a plain loop over data held in memory;
``same plan`` is recpipe by that very plan, so that the ratio is what the framework costs. The other rows
are recpipe with one sharding type for all tables, or with a planner. The first 10 steps are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from recpipe.common.process import calm_threads

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))
from work import SETTINGS, SKIPPED

BATCH = 2048
"""Samples of a step, over all ranks."""
NEO = "+plugin=neo"
PLAIN = [NEO, "plugins.neo.planner=torchrec"]
ROWS: dict[str, list[str]] = {
    **{t: [*PLAIN, f"plugins.neo.sharding={t}"] for t in ("table_wise", "row_wise", "table_row_wise")},
    "table_wise, fp16": [
        *PLAIN,
        "plugins.neo.sharding=table_wise",
        "plugins.neo.forward_precision=fp16",
        "plugins.neo.backward_precision=bf16",
    ],
    **{
        f"planner {planner}": [NEO, f"plugins.neo.planner={planner}"]
        for planner in ("torchrec", "greedy", "karmarkar_karp", "measured")
    },
}
Run = dict[str, Any]


def write_samples(directory: Path, samples: int) -> None:
    """TorchRec's .npy triple of generated clicks, and the tables' rows."""
    from recpipe.data.config import SyntheticConfig
    from recpipe.data.sources.synthetic import SyntheticDataset

    dataset = SyntheticDataset(SyntheticConfig(samples=samples, eval_fraction=0.0), seed=1)
    features = len(dataset.schema.sparse)
    dense, ids, labels = [], [], []
    for batch in dataset.batches("train", 65_536):
        dense.append(batch.dense.numpy())
        ids.append(batch.sparse.values().numpy().reshape(features, -1).T.astype(np.int32))
        labels.append(batch.labels.numpy().astype(np.int32)[:, None])
    for name, parts in (("dense", dense), ("sparse", ids), ("labels", labels)):
        np.save(directory / f"day_0_{name}.npy", np.concatenate(parts))
    rows = {feature.name: feature.rows for feature in dataset.schema.sparse}
    (directory / "tables.json").write_text(json.dumps(rows))


def train_by_hand(directory: Path, out: Path, size: str) -> None:
    """One rank of the hand-written loop; rank 0 writes samples per second and the plan to ``out``."""
    import torch
    import torch.distributed as dist
    from hand_dmp import HandWritten
    from torchrec.distributed.types import ShardingPlan

    from recpipe.plugin.tables import SparseFeature, TableOptimizer, TableSet
    from recpipe.tables.groups import ModelTables
    from recpipe.tables.sharding.plan import from_torchrec, module_paths

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = json.loads((directory / "tables.json").read_text())
    dense = torch.from_numpy(np.load(directory / "day_0_dense.npy"))
    ids = torch.from_numpy(np.ascontiguousarray(np.load(directory / "day_0_sparse.npy").T)).long()
    labels = torch.from_numpy(np.load(directory / "day_0_labels.npy")[:, 0]).float()
    mine = BATCH // world
    by_hand = HandWritten(rows, SETTINGS[size], mine)
    steps, started = len(labels) // BATCH, 0.0
    for step in range(steps):
        if step == SKIPPED:
            dist.barrier()
            started = perf_counter()
        part = slice(step * BATCH + rank * mine, step * BATCH + (rank + 1) * mine)
        by_hand.step(dense[part], ids[:, part].reshape(-1), labels[part])
    dist.barrier()
    speed = (steps - SKIPPED) * BATCH / (perf_counter() - started)
    if rank == 0:
        features = tuple(SparseFeature(n, r) for n, r in rows.items())
        tables = TableSet.one_each(
            features, SETTINGS[size].dim, TableOptimizer("rowwise_adagrad", 0.02), seed=1
        )
        model = ModelTables.single(tables)
        (module,), (path,) = by_hand.plan.plan.values(), module_paths(model)
        plan = from_torchrec(ShardingPlan({path: module}), model, {}, world)
        (out / "plan.json").write_text(json.dumps(plan.to_dict()))
        (out / "by_hand.json").write_text(json.dumps({"speed": speed}))
    dist.barrier()
    os._exit(0)  # gloo's threads may abort an orderly end


def started(ranks: int, *words: str) -> None:
    """torchrun of ``ranks`` processes; its output only where it fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([*command, *words], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{done.stderr[-3000:]}")


def by_recpipe(ranks: int, directory: Path, work: Path, size: str, overrides: list[str]) -> Run:
    """Samples per second and TorchRec's collectives of a run of recpipe."""
    tables = json.loads((directory / "tables.json").read_text())
    started(
        ranks, "-m", "recpipe", "data=npy", f"data.path={directory}", "data.eval_fraction=0.0",
        f"data.tables={json.dumps(tables).replace(chr(34), '')}", f"data.batch_size={BATCH}",
        f"data.cache_dir={work / 'cache'}", f"model.bottom={list(SETTINGS[size].bottom)}",
        f"model.top={list(SETTINGS[size].top)}",
        "trainer.checkpoint_every=null", f"hydra.run.dir={work / 'run'}", *overrides,
    )  # fmt: skip
    report = json.loads((work / "run" / "report.json").read_text())
    steps = report["data"]["train_samples"] / BATCH
    collectives = {
        name: {
            "bytes": c["bytes_sent"] / steps,
            "wait_ms": 1e3 * c["wait_seconds"] / steps,
            "calls": c["calls"] / steps,
        }
        for name, c in report["ranks"]["collectives"].items()
    }
    # Without the first steps, which the loop by hand leaves out too.
    return {"speed": report["throughput"]["steady_samples_per_second"], "collectives": collectives}


def measure(
    ranks: int, directory: Path, work: Path, size: str, repetitions: int, rows: list[str]
) -> dict[str, list[Run]]:
    """Every row in turn, ``repetitions`` times; a round before them is not counted."""
    found: dict[str, list[Run]] = {}
    for number in range(repetitions + 1):
        started(ranks, __file__, "--by-hand", str(directory), str(work), size)
        runs = {"by hand": json.loads((work / "by_hand.json").read_text())}
        same = [f"tiers.plan={work / 'plan.json'}", "tiers.split_rows=true"]
        runs["same plan"] = by_recpipe(ranks, directory, work, size, same)
        for name in rows:
            runs[name] = by_recpipe(ranks, directory, work, size, ROWS[name])
        for name, run in runs.items():
            if number:
                found.setdefault(name, []).append(run)
    return found


def show(ranks: int, found: dict[str, list[Run]]) -> None:
    """One line a row: speed, ratio to the hand-written loop of the same round, and its collectives."""
    print(f"\n{ranks} ranks{'':<18} samples/s   ratio to by hand      sent by rank 0 and waits, a step")
    for name, runs in found.items():
        speed = statistics.median(r["speed"] for r in runs)
        ratios = [r["speed"] / h["speed"] for r, h in zip(runs, found["by hand"], strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})"
        last = runs[-1].get("collectives", {})
        moved = ", ".join(
            f"{n} x{c['calls']:.0f} {c['bytes'] / 1024:,.0f} KiB {c['wait_ms']:.1f} ms"
            for n, c in last.items()
        )
        print(f"{name:<24} {speed:>10,.0f}   {spread:<20} {moved}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--samples", type=int, default=300_000)
    parser.add_argument("--rows", nargs="*", default=list(ROWS), help=f"of: {', '.join(ROWS)}")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", choices=["small", "tiny"], default="small")
    parser.add_argument("--by-hand", nargs=3, metavar=("DIR", "OUT", "MODEL"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.by_hand:
        train_by_hand(Path(arguments.by_hand[0]), Path(arguments.by_hand[1]), arguments.by_hand[2])
        return
    calm_threads()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        directory, work = Path(folder, "data"), Path(folder, "work")
        directory.mkdir()
        work.mkdir()
        write_samples(directory, arguments.samples)
        for ranks in arguments.ranks:
            results[ranks] = measure(
                ranks, directory, work, arguments.model, arguments.repetitions, arguments.rows
            )
            show(ranks, results[ranks])
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
