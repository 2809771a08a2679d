"""DLRM-DCNv2 in the shape and batch of MLPerf Training: samples a second a core, beside the published rate.

    python benchmarks/mlperf_per_core.py FOLDER [--rounds 2] [--json benchmarks/results] [OVERRIDE ...]

``experiment=mlperf_dlrm_dcnv2``: the benchmark's dense part, dimension, optimizer and pooling factors, on
generated clicks, with tables of at most 20,000 rows, which lookups find in caches more often than those of up
to 40 million. Batches have 8,192 samples: the reference's 65,536 over 8 processes. float32 and bfloat16
take turns; each round is a run of its own, of which the median step counts.

A rate is made comparable by operations: samples a second times the multiplications and additions of this
model for a sample, over those of the benchmark's, which are the same unless overrides change the model. The
published rate is of whole runs, with their evaluations; this one is of training alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

BATCH, STEPS = 8192, 4
DENSE, SPARSE = 13, 26
OPERATIONS = 96.2e6
"""Of the benchmark's dense part for a sample, forward and backward."""
PUBLISHED = ["8 Sapphire Rapids sockets (IPEX), Training v3.1, 2023, evaluations included", None, 96.2, 564]
PRECISIONS = ("float32", "bfloat16")
COLUMNS = {
    "side": None,
    "samples a process": "{:,.0f}",
    "MFLOP a sample": "{:,.1f}",
    "samples/s a core": "{:,.0f}",
    "GFLOP/s a core": "{:,.0f}",
    "of the published rate, by FLOP": "{:.2f}",
}


def recipe(precision: str, overrides: Sequence[str]) -> list[str]:
    """What a run is composed of."""
    sizes = [f"data.batch_size={BATCH}", f"data.samples={STEPS * BATCH}", f"trainer.max_steps={STEPS}"]
    without = ["data.eval_fraction=0.0", "trainer.checkpoint_every=null", "trainer.logger=null"]
    experiment = ["experiment=mlperf_dlrm_dcnv2", f"model.precision={precision}", "trainer.progress=false"]
    return [*experiment, *sizes, *without, *overrides]


def rate(folder: Path, words: Sequence[str]) -> tuple[float, dict[str, Any]]:
    """Samples a second of a run's median step, and the run's environment."""
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    command = [sys.executable, "-m", "recpipe", *words, f"hydra.run.dir={run}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    report = json.loads((run / "report.json").read_text())
    return BATCH / report["throughput"]["step_ms"]["p50"] * 1e3, report["environment"]


def operations(words: Sequence[str]) -> float:
    """Of the recipe's dense part for a sample, forward and backward."""
    from recpipe.config.compose import compose
    from recpipe.config.recipe import Recipe
    from recpipe.profiling.workload import dense_work

    model = Recipe.of(compose(list(words))).model
    return sum(work.flops for work in dense_work(model, DENSE, SPARSE, BATCH).values()) / BATCH


def row(side: str, batch: int | None, mega: float, rates: Sequence[float]) -> list[Any]:
    """A line of the table; ``rates``: of each round, samples a second a core."""
    by_operations = [1e6 * mega * each for each in rates]
    published = OPERATIONS * PUBLISHED[3]
    cells = [
        list(rates),
        [each / 1e9 for each in by_operations],
        [each / published for each in by_operations],
    ]
    return [side, batch, mega, *({"rounds": each} if len(each) > 1 else each[0] for each in cells)]


def result(rows: Sequence[Any], made: Mapping[str, Any]) -> dict[str, Any]:
    """The table for docs/tables.py."""
    return {
        "title": "DLRM-DCNv2 as MLPerf has it, a core",
        "command": "python benchmarks/mlperf_per_core.py FOLDER --json benchmarks/results",
        "machine": f"{made['cores']} cores of {made['cpu']}, a virtual machine",
        "commit": (made["commit"] or "")[:8],
        "date": date.today().isoformat(),
        "kept": "each round",
        "columns": COLUMNS,
        "rows": [*rows, row(PUBLISHED[0], PUBLISHED[1], PUBLISHED[2], [PUBLISHED[3]])],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*")
    asked = parser.parse_intermixed_args()
    folder, cores = asked.folder.absolute(), os.cpu_count() or 1
    folder.mkdir(parents=True, exist_ok=True)
    rates: dict[str, list[float]] = {precision: [] for precision in PRECISIONS}
    made: dict[str, Any] = {}
    for _ in range(asked.rounds):
        for precision, own in rates.items():
            speed, made = rate(folder, recipe(precision, asked.overrides))
            own.append(speed / cores)
            print(f"{precision}: {own[-1]:,.0f} samples/s a core", flush=True)
    mega = operations(recipe(PRECISIONS[0], asked.overrides)) / 1e6
    rows = [row(f"recpipe, {precision}", BATCH, mega, own) for precision, own in rates.items()]
    told = result(rows, made)
    for line in told["rows"]:
        print(*line, sep="  ")
    if asked.json is not None:
        (asked.json / "mlperf_per_core.json").write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
