"""What HET ships and learns over its bound s: a table and a plot.

    python benchmarks/het_staleness.py [--bounds 0 1 10] [--ranks 2] [OVERRIDE ...]

One run for each s, each in a process (or, with --ranks, a torchrun) of its own, never two at once. Without an
experiment the plugin is added to the recipe. Rows and bytes are those that rank 0 ships in training; what is
pushed for an evaluation is not in them. Staleness is the largest of all ranks.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--bounds", type=int, nargs="+", default=[0, 1, 3, 10, 30, 100])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--png", type=Path, default=Path("het_staleness.png"))
    parser.add_argument("overrides", nargs="*", help="the recipe, such as experiment=... data.path=...")
    arguments = parser.parse_intermixed_args()
    reports = {
        bound: train([*arguments.overrides, f"plugins.het.bound={bound}"], arguments.ranks)
        for bound in sorted(set(arguments.bounds))
    }
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


def shipped(report: dict[str, Any]) -> tuple[int, int]:
    """Rows and bytes that a run pulled and pushed."""
    het = report["plugins"]["het"]
    return het["rows_pulled"] + het["rows_pushed"], het["bytes_pulled"] + het["bytes_pushed"]


def show(reports: dict[int, dict[str, Any]]) -> None:
    """Print the table; bytes are compared with those of the smallest s."""
    least = min(reports)
    table = Table(
        "s",
        "rows shipped",
        "MiB shipped",
        f"fewer than s = {least}",
        "largest staleness",
        "AUC",
        "AUC difference",
    )
    for bound, report in reports.items():
        rows, size = shipped(report)
        fewer = 1 - size / max(1, shipped(reports[least])[1])
        stale, auc = report["plugins"]["het"]["largest_staleness"], report["quality"]["auc"]
        difference = auc - reports[least]["quality"]["auc"]
        table.add_row(
            f"{bound:,}", f"{rows:,}", f"{size / 2**20:.2f}", f"{fewer:.1%}", f"{stale:,}", f"{auc:.4f}",
            f"{difference:+.4f}",
        )  # fmt: skip
    Console().print(table)


def plot(reports: dict[int, dict[str, Any]], file: Path) -> None:
    """Bytes and AUC against s."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    bounds = list(reports)
    left.plot(bounds, [shipped(report)[1] / 2**20 for report in reports.values()], "o-")
    right.plot(bounds, [report["quality"]["auc"] for report in reports.values()], "o-")
    for axes, name in ((left, "MiB shipped"), (right, "AUC")):
        axes.set(xlabel="bound s", ylabel=name, xscale="symlog")
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
