"""What ids that grow cost a whole training run: steps a second beside the same run with a fixed table.

    python benchmarks/growing_training.py [--dims 16 64] [--epochs 2] [--rounds 3] [KEY=VALUE ...]

A DLRM on generated clicks, eight features that share a table of 2,000,000 rows, few ids often, batches of
8,192 samples. ``fixed`` hashes ids into the table when data are prepared; with ``grown`` the loader's thread
gives them rows while the batch before trains, so that only what it takes of the training's cores counts. In
the first epoch most batches bring new ids. Each run is a process of its own, in turn; printed are medians of
the rounds: steps a second over all steps, the median step, and what other programs had of the processors.
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

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROWS = 2_000_000
FEATURES = tuple(f"f{number}" for number in range(8))
BATCH = 8192
KINDS: dict[str, dict[str, Any]] = {"fixed": {"rows": ROWS}, "grown": {"rows": "dynamic", "capacity": ROWS}}


def write(file: Path, samples: int) -> None:
    """Clicks that depend on one id and one number."""
    rng = np.random.default_rng(1)
    keys = {name: ((ROWS - 2) ** rng.random(samples)).astype(np.int64) - 1 for name in FEATURES}
    numbers = {f"x{number}": rng.lognormal(size=samples) for number in range(4)}
    chance = 1 / (1 + np.exp(1 - numbers["x0"] + (keys["f0"] % 7 > 3)))
    pq.write_table(
        pa.table({"click": (rng.random(samples) < chance).astype(np.int8), **keys, **numbers}), file
    )


def run(folder: Path, kind: str, dim: int, words: list[str]) -> dict[str, float]:
    """``steps_a_second``, ``step_ms`` and ``others`` of one training run."""
    described = {
        "labels": ["click"],
        "features": [
            *({"name": name, "table": "ids", **KINDS[kind]} for name in FEATURES),
            *({"name": f"x{number}", "kind": "dense", "scale": "log1p"} for number in range(4)),
        ],
    }
    schema, out = folder / f"{kind}.yaml", folder / "out"
    schema.write_text(json.dumps(described))  # which is yaml, too
    command = [
        sys.executable, "-m", "recpipe", "data=files", f"data.path={folder / 'rows.parquet'}",
        f"data.features={schema}", f"data.cache_dir={folder / 'cache'}", f"data.batch_size={BATCH}",
        f"model.embedding_dim={dim}", "trainer.progress=false", "trainer.logger=null",
        "trainer.eval_every=1.0", "trainer.checkpoint_every=null", "task.page=false",
        f"hydra.run.dir={out}", *words,
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    throughput = json.loads((out / "report.json").read_text())["throughput"]
    return {
        "steps_a_second": throughput["samples_per_second"] / BATCH,
        "step_ms": throughput["step_ms"]["p50"],
        "others": throughput["others_cpu_share"],
    }


def main() -> None:
    """Train in turn, and print a line for each dimension and kind."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64])
    for name, usual in (("samples", 400_000), ("epochs", 2), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    options, overrides = parser.parse_known_args()
    words = [f"trainer.max_epochs={options.epochs}", *overrides]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder / "rows.parquet", options.samples)
        for dim in options.dims:
            found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
            for number in range(options.rounds):
                for kind in list(KINDS)[:: 1 if number % 2 else -1]:
                    found[kind].append(run(folder, kind, dim, words))
            told = {
                kind: {key: median(each[key] for each in own) for key in own[0]}
                for kind, own in found.items()
            }
            for kind, own in told.items():
                ratio = own["steps_a_second"] / told["fixed"]["steps_a_second"]
                print(
                    f"dim {dim:4} {kind}: {own['steps_a_second']:7.2f} steps/s ({ratio:.2f} of fixed), "
                    f"median step {own['step_ms']:.1f} ms, others {own['others']:.0%}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
