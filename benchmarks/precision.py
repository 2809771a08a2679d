"""Fewer bits for tables over several ranks: quality and bytes sent, every row by the same plan of shards.

    python benchmarks/precision.py data=criteo data.path=FILE_OR_DIR [OVERRIDE ...]
        [--ranks 2] [--seeds 5] [--sharding table_wise] [--directory precision]

Every row trains with every seed, each run in a torchrun of its own. The plan is made once, for float32, with
one sharding type for all tables; the other runs train by that file. Differences to float32 are paired by
seed, with 95% intervals (Student's t). Bytes are those that rank 0 sends in TorchRec's collectives, ids
included.

Runs stay in the directory, and those that are there already are not run again: after Ctrl-C the same command
goes on. int8 is left out where pooled tables are split by rows: TorchRec has no int8 reduce-scatter.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recpipe.report.compared import mean_interval
from recpipe.tasks.process import interrupt_on_sigterm, run_apart

BASE = "float32"
ROWS: dict[str, list[str]] = {
    BASE: [],
    "forward fp16, backward bf16": [
        "plugins.neo.forward_precision=fp16",
        "plugins.neo.backward_precision=bf16",
    ],
    "both bf16": ["plugins.neo.forward_precision=bf16", "plugins.neo.backward_precision=bf16"],
    "both int8": ["plugins.neo.forward_precision=int8", "plugins.neo.backward_precision=int8"],
    "tables fp16": ["plugins.neo.table_precision=fp16"],
    "dense part bfloat16": ["model.precision=bfloat16"],
}
TYPES = ("table_wise", "column_wise", "row_wise", "table_row_wise")
FIGURES = ("auc", "logloss")
Reports = dict[str, list[dict[str, Any]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--sharding", choices=TYPES, default="table_wise")
    parser.add_argument("--directory", type=Path, default=Path("precision"))
    parser.add_argument("overrides", nargs="*", help="the recipe, such as data=criteo data.path=...")
    arguments = parser.parse_intermixed_args()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // arguments.ranks)))
    rows = [name for name in ROWS if "int8" not in name or "row_wise" not in arguments.sharding]
    recipe = [
        "+plugin=neo",
        "plugins.neo.planner=torchrec",
        f"plugins.neo.sharding={arguments.sharding}",
        *(["tiers.split_rows=true"] if arguments.sharding == "column_wise" else []),
        "trainer.checkpoint_every=null",
        "trainer.eval_every=1.0",
        "trainer.progress=false",
        *arguments.overrides,
    ]
    try:
        with interrupt_on_sigterm():
            reports = train_all(arguments.directory.resolve(), rows, recipe, arguments.ranks, arguments.seeds)
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on from here")
    show(reports, arguments.sharding)


def train_all(directory: Path, rows: Sequence[str], recipe: list[str], ranks: int, seeds: int) -> Reports:
    """Every row's reports, by seed; all runs have the plan of the first."""
    reports: Reports = {name: [] for name in rows}
    plan: Path | None = None
    for seed in range(1, seeds + 1):
        for name in rows:
            folder = directory / f"{name.replace(' ', '-').replace(',', '')}-{seed}"
            words = [*recipe, *ROWS[name], f"seed={seed}", f"hydra.run.dir='{folder}'"]
            if plan is not None:
                words.append(f"tiers.plan='{plan}'")
            reports[name].append(train(folder, words, ranks))
            plan = plan or folder / "plan.json"
            assert json.loads((folder / "plan.json").read_text()) == json.loads(plan.read_text())
            print(f"seed {seed}  {name}: AUC {reports[name][-1]['quality']['auc']:.4f}", flush=True)
    return reports


def train(folder: Path, words: list[str], ranks: int) -> dict[str, Any]:
    """The report of a run, which is made unless it is there already."""
    done = folder / "words.json"
    if done.exists() and json.loads(done.read_text()) == [*words, ranks]:
        report: dict[str, Any] = json.loads((folder / "report.json").read_text())
        return report
    report = run_apart(words, folder, ranks)
    done.write_text(json.dumps([*words, ranks]))
    return report


def show(reports: Reports, sharding: str) -> None:
    """Print the table in Markdown."""
    seeds = len(reports[BASE])
    print(f"\nAll tables {sharding}, one plan; mean of {seeds} seeds, difference to {BASE} by seed\n")
    print("| | AUC | difference | logloss | difference | sent by rank 0 |")
    print("|---|---|---|---|---|---|")
    for name, runs in reports.items():
        cells = [part for figure in FIGURES for part in quality(runs, reports[BASE], figure)]
        mib = statistics.mean(sent(run) for run in runs) / 2**20
        print(f"| {name} | {' | '.join(cells)} | {mib:.0f} MiB |")


def quality(runs: list[dict[str, Any]], base: list[dict[str, Any]], figure: str) -> tuple[str, str]:
    """The mean of a figure, and of its difference to ``base``'s with the interval."""
    values, first = ([run["quality"][figure] for run in of] for of in (runs, base))
    mean = f"{statistics.mean(values):.4f}"
    if runs is base:
        return mean, "-"
    differences = [value - other for value, other in zip(values, first, strict=True)]
    interval = mean_interval(differences)
    spread = f" ({interval[0]:+.4f}..{interval[1]:+.4f})" if interval else ""
    return mean, f"{statistics.mean(differences):+.4f}{spread}"


def sent(report: dict[str, Any]) -> int:
    """Bytes that rank 0 sent in TorchRec's collectives."""
    return sum(int(made["bytes_sent"]) for made in report["ranks"]["collectives"].values())


if __name__ == "__main__":
    main()
