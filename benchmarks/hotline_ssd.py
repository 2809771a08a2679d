"""Hotline on the ssd tier against nocache, lru and lfu, and how far it is from its bound.

    python benchmarks/hotline_ssd.py [--repetitions 5] [--samples 600000] [--scale 20.5] [OVERRIDE ...]

Runs ``task=compare`` on generated clicks over large tables (20.5 times the default: 20 million rows) with
10% of the bytes resident, and reads the runs' own reports. The bound for a batch is
T_base / (max(T_fetch, T_pop) + T_non), T_base = T_fetch + T_pop + T_non: what hiding fetches behind
popular micro-batches alone can give. Prefetching the next batch's rows can beat it.
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

ROWS = ["nocache", "lru", "lfu", "hotline"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--samples", type=int, default=600_000)
    parser.add_argument("--scale", type=float, default=20.5)
    parser.add_argument(
        "--dir", type=Path, help="where the runs and their row files go (default: a temporary folder)"
    )
    parser.add_argument("overrides", nargs="*", help="further overrides of the recipe")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        out = Path(folder, "compare")
        command = [
            sys.executable, "-m", "recpipe", "task=compare",
            f"compare.plugins=[{','.join(ROWS)}]",
            f"compare.repetitions={arguments.repetitions}", "tiers=ssd", "tiers.resident_bytes=10%",
            f"data.table_scale={arguments.scale}", f"data.samples={arguments.samples}",
            "data.eval_fraction=0.05",
            f"hydra.run.dir={out}", *arguments.overrides,
        ]  # fmt: skip
        subprocess.run(command, check=True)
        reports = [
            json.loads(p.read_text()) for p in sorted(out.glob("runs/round-*-hotline/report.json"))[1:]
        ]
        rows = {row["name"]: row for row in json.loads((out / "compare.json").read_text())["rows"]}
    show_ratios(rows)
    show_bound(reports)


def show_ratios(rows: dict[str, dict[str, Any]]) -> None:
    """Hotline's speed over each baseline's, round by round."""
    for name in ROWS[:-1]:
        pairs = zip(rows["hotline"]["rounds"], rows[name]["rounds"], strict=True)
        ratios = [ours / theirs for ours, theirs in pairs]
        print(f"hotline / {name}: {median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})")


def show_bound(reports: list[dict[str, Any]]) -> None:
    """Where a hotline step's time goes, and what the bound would give, in milliseconds per step."""
    parts: dict[str, list[float]] = {}
    for report in reports:
        figures, io = report["plugins"]["hotline"], report["io"]
        steps = sum(report["throughput"]["step_histogram"]["counts"])
        step = report["recipe"]["data"]["batch_size"] / report["throughput"]["samples_per_second"] * 1000
        fetch, pop, non = (
            1000 * seconds / steps
            for seconds in (io["fetch_seconds"], figures["popular_seconds"], figures["non_popular_seconds"])
        )
        bound = max(fetch, pop) + non
        shares = {
            "step": step,
            "fetch": fetch,
            "popular micro-batch": pop,
            "non-popular micro-batch": non,
            "write back (the same I/O thread)": 1000 * io["write_seconds"] / steps,
            "wait for cold rows": 1000 * io["wait_seconds"] / steps,
            "planning (the loader's thread)": 1000 * io["plan_seconds"] / steps,
            "serial: fetch + popular + non-popular": fetch + pop + non,
            "bound: max(fetch, popular) + non-popular": bound,
        }
        for name, value in shares.items():
            parts.setdefault(name, []).append(value)
    for name, values in parts.items():
        print(f"{name:<42} {median(values):8.2f} ms per step ({min(values):.2f}..{max(values):.2f})")


if __name__ == "__main__":
    main()
