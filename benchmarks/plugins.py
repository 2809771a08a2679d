"""Every plugin against nocache, lru and lfu on the same budget: generated clicks and Criteo, by store.

    python benchmarks/plugins.py [--criteo FILE] [--stores ssd holders emulated] [--rows ROW ...]

For each data set and store one ``task=compare``: runs interleaved, each in processes of its own, 10% of
the bytes resident. ``ssd`` is one process over files; ``holders`` a trainer and a process that holds the
rows on the SSD; ``emulated`` the same with 100 us a message and 10 Gbit/s between them. The large set has
20 million rows of tables; Criteo's file is repeated (as epochs) to 500,000 samples or more.

Below each table: every row's speed over nocache's and over the better of lru and lfu, and what bounds it.
``compute`` is the step of the ``resident`` row, which moves nothing: no technique that trains every sample
can be faster. ``I/O`` is the time that the I/O thread was busy per step: what is not hidden waits. Speeds are
of all steps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

ROWS = [
    "resident",
    "nocache",
    "lru",
    "lfu",
    "fae",
    "hotline",
    "slipstream",
    "hotline+slipstream",
    "bagpipe",
    "het",
]
STORES = {
    "ssd": ["tiers=ssd"],
    "holders": ["tiers=ssd", "compare.ranks=2", "topology.embedding_ranks=[1]"],
    "emulated": [
        "tiers=ssd", "compare.ranks=2", "topology.embedding_ranks=[1]",
        "tiers.emulate.latency_us=100", "tiers.emulate.gbit_per_s=10",
    ],
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--criteo", type=Path, help="a file of Criteo's clicks; without it: generated clicks only"
    )
    parser.add_argument("--epochs", type=int, default=8, help="how often Criteo's file is repeated")
    parser.add_argument("--samples", type=int, default=300_000, help="of the generated clicks")
    parser.add_argument(
        "--scale", type=float, default=20.5, help="of the generated tables: 20.5 is 20 million rows"
    )
    parser.add_argument("--sets", nargs="*", default=["large", "criteo"], choices=["large", "criteo"])
    parser.add_argument("--stores", nargs="*", default=list(STORES), choices=list(STORES))
    parser.add_argument("--rows", nargs="*", default=ROWS)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="where runs and row files go (default: a temporary folder)")
    parser.add_argument("overrides", nargs="*", help="further overrides of the recipe")
    arguments = parser.parse_args()
    recipes = {
        "large": [
            f"data.table_scale={arguments.scale}", f"data.samples={arguments.samples}",
            "data.eval_fraction=0.05",
        ],
        "criteo": [
            "experiment=criteo_small", f"data.path={arguments.criteo}", "data.batch_size=2048",
            f"trainer.max_epochs={arguments.epochs}",
        ],
    }  # fmt: skip
    for name in arguments.sets:
        if name == "criteo" and arguments.criteo is None:
            continue
        for store in arguments.stores:
            with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
                out = Path(folder, "compare")
                rows = [r for r in arguments.rows if r != "resident" or store == "ssd"]
                command = [
                    sys.executable, "-m", "recpipe", "task=compare", f"compare.plugins=[{','.join(rows)}]",
                    f"compare.repetitions={arguments.repetitions}", "compare.warmup=0", *recipes[name],
                    *STORES[store], "tiers.resident_bytes=10%", f"hydra.run.dir={out}", *arguments.overrides,
                ]  # fmt: skip
                print(f"\n## {name}, {store}\n", flush=True)
                subprocess.run(command, check=True)
                show(json.loads((out / "compare.json").read_text()), reports(out))


def reports(out: Path) -> dict[str, list[dict[str, Any]]]:
    """The runs' own reports, by row."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(out.glob("runs/round-*/report.json")):
        found.setdefault(path.parent.name.split("-", 3)[3], []).append(json.loads(path.read_text()))
    return found


def show(comparison: dict[str, Any], runs: dict[str, list[dict[str, Any]]]) -> None:
    """Ratios of interleaved rounds, and where a step's time goes."""
    rows = {row["name"]: row for row in comparison["rows"]}
    columns = "/ nocache | / better of lru, lfu | AUC difference"
    print(f"\n| recipe | {columns} | step ms | I/O ms | waited ms |")
    print("|---|---|---|---|---|---|---|")
    best = max(("lru", "lfu"), key=lambda name: rows[name]["samples_per_second"]["median"])
    for name, row in rows.items():
        steps = [measured(run) for run in runs[name]]
        step, io, wait = (median(values) for values in zip(*steps, strict=True))
        against = [ratio(row["rounds"], rows[other]["rounds"]) for other in ("nocache", best)]
        difference = row["auc"] - rows["nocache"]["auc"]
        cells = [name, *against, f"{difference:+.5f}", f"{step:.1f}", f"{io:.1f}", f"{wait:.1f}"]
        print(f"| {' | '.join(cells)} |")
    if "resident" in rows:
        compute = median(measured(run)[0] for run in runs["resident"])
        bests = median(measured(run)[0] for run in runs[best])
        base = median(measured(run)[0] for run in runs["nocache"])
        print(
            f"\ncompute bound: {compute:.1f} ms per step, so at most {base / compute:.2f} times nocache and "
            f"{bests / compute:.2f} times {best}"
        )


def ratio(speeds: list[float], others: list[float]) -> str:
    """Speed over another row's, round by round: the median with the lowest and the highest."""
    ratios = [a / b for a, b in zip(speeds, others, strict=True)]
    return f"{median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})"


def measured(report: dict[str, Any]) -> tuple[float, float, float]:
    """Milliseconds per step: all of it, the I/O thread's, and the training's wait for rows."""
    steps = sum(report["throughput"]["step_histogram"]["counts"])
    step = report["recipe"]["data"]["batch_size"] / report["throughput"]["samples_per_second"] * 1000
    io = report["io"]
    return step, 1000 * (io["fetch_seconds"] + io["write_seconds"]) / steps, 1000 * io["wait_seconds"] / steps


if __name__ == "__main__":
    main()
