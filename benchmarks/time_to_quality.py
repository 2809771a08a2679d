"""Ten runs of MLPerf Training's recommenders, scaled, to their targets, judged by its checkers.

    python benchmarks/time_to_quality.py FOLDER --taobao taobao_110k.parquet [--json benchmarks/results]

``task=time_to_quality`` of ``experiment=mlperf_dlrm_dcnv2`` and ``mlperf_dlrmv4``, and ``recpipe rcp check``,
whose verdicts are printed. Without ``--taobao`` the first one alone. ``--json``: a folder for the table that
docs/tables.py shows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

PUBLISHED = [
    ["8 Sapphire Rapids sockets (IPEX), Training v3.1, 2023: the whole benchmark", 564],
    ["8 NVIDIA H100 (HugeCTR), Training v4.1, 2024, a GPU: the whole benchmark", 1_720_000],
]
"""Samples a second a core, or a GPU, of DLRM-DCNv2, evaluations included, by the logs that were submitted."""
COMMAND = "python benchmarks/time_to_quality.py FOLDER --taobao taobao_110k.parquet --json benchmarks/results"
COLUMNS = {
    "benchmark": None,
    "target": None,
    "reached it": None,
    "samples to it": "{:,.0f}",
    "seconds to it": "{:,.1f}",
    "samples/s a core": "{:,.0f}",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--taobao", type=Path, help="Taobao's two hours of all users, as parquet")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--json", type=Path)
    parser.add_argument("words", nargs="*", help="overrides of all runs")
    asked = parser.parse_args()
    data = {"dlrm_dcnv2": []}
    if asked.taobao is not None:
        data["dlrmv4"] = [f"data.path={asked.taobao.absolute()}"]
    rows, about = [], {}
    for name, words in data.items():
        run = asked.folder / name
        recipe = [f"experiment=mlperf_{name}", *words, f"quality.runs={asked.runs}", *asked.words]
        recpipe("task=time_to_quality", *recipe, f"hydra.run.dir={run}")
        recpipe("rcp", "check", str(run), fails=True)
        about = json.loads((run / "time_to_quality.json").read_text())
        rows.append(row(name, about))
    if asked.json is not None:
        asked.json.mkdir(parents=True, exist_ok=True)
        asked.json.joinpath("time_to_quality.json").write_text(
            json.dumps(result(rows, about), indent=1) + "\n"
        )


def recpipe(*words: str, fails: bool = False) -> None:
    """Run recpipe in a process of its own; ``fails``: it may end with 1."""
    print("recpipe", *words, flush=True)
    code = subprocess.run([sys.executable, "-m", "recpipe", *words]).returncode
    if code and not (fails and code == 1):
        sys.exit(code)


def row(name: str, told: Mapping[str, Any]) -> list[Any]:
    """A benchmark's line: olympic means (fewest..most), evaluations inside of the time."""
    (own,) = told["rows"]
    spread = [
        [own[what]["olympic_mean"], own[what]["min"], own[what]["max"]] for what in ("samples", "seconds")
    ]
    samples, seconds = (each if each[0] is not None else "no result" for each in spread)
    rate = own["samples"]["olympic_mean"] / own["seconds"]["olympic_mean"] / os.cpu_count()
    reached = f"{own['converged']} of {len(own['runs'])}"
    target = f"{told['metric'].upper()} {told['target']:g}"
    return [f"`{name}`, scaled", target, reached, samples, seconds, rate]


def result(rows: Sequence[Any], about: Mapping[str, Any]) -> dict[str, Any]:
    """The table for docs/tables.py."""
    made = about["environment"]
    published = [[name, "AUC 0.80275", "", None, None, rate] for name, rate in PUBLISHED]
    return {
        "title": "Time to quality of MLPerf Training's recommenders, scaled",
        "command": COMMAND,
        "machine": f"{made['cores']} cores of {made['cpu']}, a virtual machine",
        "commit": (made["commit"] or "")[:8],
        "date": date.today().isoformat(),
        "kept": "means without the fastest and the slowest run (fewest..most)",
        "columns": COLUMNS,
        "rows": [*rows, *published],
    }


if __name__ == "__main__":
    main()
