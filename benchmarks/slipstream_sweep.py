"""What Slipstream buys and costs over its drop share D: a table and a plot.

    python benchmarks/slipstream_sweep.py [--drops 0 0.1 0.3] [--seeds 3] [--beside hotline] [OVERRIDE ...]

For every seed (of weights and generated data): one run without Slipstream, then one for each D, each in a
process of its own, never two at once. Differences and ratios are to the run without it of the same seed; the
figures shown are means over seeds with the lowest and the highest. ``--beside`` names the plugins that all
runs have; '' compares with the recipe without plugins, that is with all rows resident.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

FIGURES = {
    "auc": "AUC difference",
    "logloss": "logloss difference",
    "dropped": "dropped share of inputs",
    "dropped_hot": "dropped share of hot inputs",
    "time": "time ratio",
}
Row = dict[str, list[float]]
"""Each figure's values, one for each seed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--drops", type=float, nargs="+", default=[0.0, 0.1, 0.2, 0.3, 0.5])
    parser.add_argument("--seeds", type=int, default=3, help="how many; 1, 2, ...")
    parser.add_argument("--beside", default="hotline", help="plugins of all runs, with commas between")
    parser.add_argument("--png", type=Path, default=Path("slipstream_sweep.png"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", help="the recipe, such as experiment=... data.path=...")
    arguments = parser.parse_intermixed_args()
    beside = [name for name in arguments.beside.split(",") if name]
    rows: dict[float, Row] = {drop: {name: [] for name in FIGURES} for drop in arguments.drops}
    for seed in range(1, arguments.seeds + 1):
        recipe = [f"seed={seed}", *arguments.overrides]
        without = train([text for text in recipe if not text.startswith("plugins.slipstream.")], beside)
        for drop, row in rows.items():
            found = train([*recipe, f"plugins.slipstream.drop={drop}"], [*beside, "slipstream"])
            for name, value in compared(found, without).items():
                row[name].append(value)
    show(rows)
    plot(rows, arguments.png)
    if arguments.json:
        arguments.json.write_text(json.dumps({str(drop): row for drop, row in rows.items()}, indent=1))


def train(recipe: list[str], plugins: list[str]) -> dict[str, Any]:
    """The report of one run."""
    with tempfile.TemporaryDirectory() as folder:
        named = [f"+plugin=[{','.join(plugins)}]"] if plugins else []
        settings = ["trainer.checkpoint_every=null", "trainer.eval_every=1.0", "trainer.progress=false"]
        command = [sys.executable, "-m", "recpipe", *settings, *named, *recipe, f"hydra.run.dir={folder}"]
        done = subprocess.run(command, stdout=subprocess.DEVNULL)
        if done.returncode:  # it has said why
            sys.exit(done.returncode)
        report: dict[str, Any] = json.loads((Path(folder) / "report.json").read_text())
    return report


def compared(found: dict[str, Any], without: dict[str, Any]) -> dict[str, float]:
    """One run's figures against the run without Slipstream."""
    slipstream = found["plugins"]["slipstream"]
    return {
        "auc": found["quality"]["auc"] - without["quality"]["auc"],
        "logloss": found["quality"]["logloss"] - without["quality"]["logloss"],
        "dropped": slipstream["dropped_share"],
        "dropped_hot": slipstream["dropped_hot_share"],
        # Dropped samples count as trained, so both speeds are of the same samples.
        "time": without["throughput"]["samples_per_second"] / found["throughput"]["samples_per_second"],
    }


def show(rows: dict[float, Row]) -> None:
    """Print the table."""
    table = Table("D", *FIGURES.values(), title="against the run without Slipstream: mean (lowest..highest)")
    for drop, row in rows.items():
        cells = []
        for name in FIGURES:
            sign = "+.4f" if name in ("auc", "logloss") else ".3f"
            low, high = min(row[name]), max(row[name])
            cells.append(f"{fmean(row[name]):{sign}} ({low:{sign}}..{high:{sign}})")
        table.add_row(f"{drop:g}", *cells)
    Console(width=160).print(table)


def plot(rows: dict[float, Row], file: Path) -> None:
    """Draw every figure over D, with the range over seeds."""
    panels = (("auc",), ("logloss",), ("dropped", "dropped_hot"), ("time",))
    figure = Figure(figsize=(4 * len(panels), 3.4), layout="constrained")
    drops = list(rows)
    for axes, names in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for name in names:
            values = [rows[drop][name] for drop in drops]
            axes.plot(drops, [fmean(v) for v in values], marker="o", label=FIGURES[name])
            axes.fill_between(drops, [min(v) for v in values], [max(v) for v in values], alpha=0.2)
        axes.set_xlabel("D, share of hot inputs to drop")
        axes.set_title(FIGURES[names[0]] if len(names) == 1 else "dropped share", fontsize=10)
        axes.grid(alpha=0.3)
        if len(names) > 1:
            axes.legend(fontsize=8)
    figure.savefig(file, dpi=150)
    print(f"plot: {file}")


if __name__ == "__main__":
    main()
