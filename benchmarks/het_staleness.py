"""What HET ships, misses and learns over its bound s: a table and a plot.

    python benchmarks/het_staleness.py [--bounds 0 1 10] [--updates each summed] [--ranks 2] [OVERRIDE ...]

One run for each s, each in a process (or, with --ranks, a torchrun) of its own, never two at once. Without an
experiment the plugin is added to the recipe. Bytes are those of the records and updates that rank 0 ships in
training; what is pushed for an evaluation is not in them. What reads miss is that of all ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

Runs = dict[tuple[str, int], dict[str, Any]]
"""Reports by who makes the steps and by bound."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--bounds", type=int, nargs="+", default=[0, 1, 3, 10, 30, 100])
    parser.add_argument("--updates", nargs="+", choices=["each", "summed"], default=["each"])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--png", type=Path, default=Path("het_staleness.png"))
    parser.add_argument("overrides", nargs="*", help="the recipe, such as experiment=... data.path=...")
    arguments = parser.parse_intermixed_args()
    reports = {}
    for updates in arguments.updates:
        for bound in sorted(set(arguments.bounds)):
            knobs = [f"plugins.het.bound={bound}", f"plugins.het.updates={updates}"]
            reports[updates, bound] = train([*arguments.overrides, *knobs], arguments.ranks)
    show(reports)
    plot(reports, arguments.png)


def train(recipe: list[str], ranks: int) -> dict[str, Any]:
    """The report of one run."""
    launch = [sys.executable, "-m"]
    if ranks > 1:
        launch += ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    plugin = [] if any(text.startswith("experiment=") for text in recipe) else ["+plugin=het"]
    settings = ["trainer.checkpoint_every=null", "trainer.eval_every=1.0", "trainer.progress=false"]
    with tempfile.TemporaryDirectory() as folder:
        command = [*launch, "recpipe", *settings, *plugin, *recipe, f"hydra.run.dir={folder}"]
        done = subprocess.run(command, stdout=subprocess.DEVNULL)
        if done.returncode:  # it has said why
            sys.exit(done.returncode)
        report: dict[str, Any] = json.loads((Path(folder) / "report.json").read_text(encoding="utf-8"))
    return report


def shipped(report: dict[str, Any]) -> int:
    """Bytes that rank 0 pulled and pushed."""
    het = report["plugins"]["het"]
    return int(het["bytes_pulled"] + het["bytes_pushed"])


def show(reports: Runs) -> None:
    """Print the table; bytes and AUC are compared with those of the first run."""
    first = next(iter(reports.values()))
    table = Table(
        "updates",
        "s",
        "MiB shipped",
        "fewer",
        "updates missed\nmean",
        "\nlargest",
        "reads that\nmiss any",
        "known to\nholder",
        "AUC",
        "difference",
    )
    for (updates, bound), report in reports.items():
        het, size, auc = report["plugins"]["het"], shipped(report), report["quality"]["auc"]
        table.add_row(
            updates, f"{bound:,}", f"{size / 2**20:.2f}", f"{1 - size / max(1, shipped(first)):.1%}",
            f"{het['mean_missed_updates']:.2f}", f"{het['largest_missed_updates']:,}",
            f"{het['reads_missing_share']:.1%}", f"{het['largest_staleness']:,}",
            f"{auc:.4f}", f"{auc - first['quality']['auc']:+.4f}",
        )  # fmt: skip
    Console(width=110).print(table)


def plot(reports: Runs, file: Path) -> None:
    """Bytes, AUC and missed updates against s."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    axes = figure.subplots(1, 3)
    for updates in dict.fromkeys(updates for updates, _ in reports):
        mine = {bound: report for (of, bound), report in reports.items() if of == updates}
        curves = (
            [shipped(report) / 2**20 for report in mine.values()],
            [report["quality"]["auc"] for report in mine.values()],
            [report["plugins"]["het"]["mean_missed_updates"] for report in mine.values()],
        )
        for part, values in zip(axes, curves, strict=True):
            part.plot(list(mine), values, "o-", label=updates)
    for part, name in zip(axes, ("MiB shipped", "AUC", "mean updates that a read misses"), strict=True):
        part.set(xlabel="bound s", ylabel=name, xscale="symlog")
        part.legend()
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
