"""Where recpipe's step goes, against what this machine could do at best: task=profile at two sizes of a DLRM.

    python benchmarks/floor.py [--settings small large] [--steps 30] [--dir DIR] [override ...]

Generated clicks of 13 dense and 26 one-hot features with Zipf ids, tables of 3 to 1,000,000 rows, in files
(TorchRec's .npy triple). Each setting is one run; its tables are printed, and its report.html, report.json
and trace stay in DIR/SETTING where --dir is given. Overrides go to every run: model.precision=bfloat16.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROWS = (
    *(1460, 583, 1_000_000, 1_000_000, 305, 24, 12_517, 633, 3, 93_145, 5683, 1_000_000, 3194, 27, 14_992),
    *(1_000_000, 10, 5652, 2173, 4, 1_000_000, 18, 15, 286_181, 105, 142_572),
)
TABLES = {f"C{number}": rows for number, rows in enumerate(ROWS, 1)}
ZIPF = 1.12
"""The r-th most popular row of a table is drawn in proportion to r^-ZIPF, nearly."""
SETTINGS = {
    "small": {"dim": 16, "batch": 2048, "bottom": [512, 256, 64], "top": [512, 256]},
    "large": {"dim": 64, "batch": 8192, "bottom": [512, 256], "top": [512, 256]},
}
WARMUP = 20


def write_clicks(directory: Path, samples: int) -> None:
    """``day_0_{dense,sparse,labels}.npy`` in ``directory``: float32 [N, 13], int32 [N, 26], int32 [N, 1]."""
    random = np.random.default_rng(1)
    ids = np.empty((samples, len(ROWS)), np.int32)
    for column, rows in enumerate(ROWS):
        # The inverse of the distribution function of a continuous r^-ZIPF on [1, rows + 1).
        uniform = random.random(samples)
        rank = ((rows + 1.0) ** (1 - ZIPF) * uniform + (1 - uniform)) ** (1 / (1 - ZIPF))
        # Popular rows lie all over a real table.
        ids[:, column] = random.permutation(rows)[np.minimum(rank.astype(np.int64) - 1, rows - 1)]
    np.save(directory / "day_0_sparse.npy", ids)
    np.save(directory / "day_0_dense.npy", random.random((samples, 13), np.float32) * 10)
    np.save(directory / "day_0_labels.npy", (random.random((samples, 1)) < 0.25).astype(np.int32))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--steps", type=int, default=30, help="that are timed, and again so many profiled")
    parser.add_argument("--dir", type=Path, help="where the reports stay")
    arguments, overrides = parser.parse_known_args()
    batch = max(int(str(SETTINGS[setting]["batch"])) for setting in arguments.settings)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data")
        data.mkdir()
        write_clicks(data, batch * (WARMUP + 2 * arguments.steps))
        for setting in arguments.settings:
            print(f"{setting}: {SETTINGS[setting]}", flush=True)
            run_dir = (arguments.dir or Path(folder)) / setting
            profile(setting, data, run_dir, arguments.steps, overrides)


def profile(setting: str, data: Path, run_dir: Path, steps: int, overrides: list[str]) -> None:
    """One run of task=profile, with its output shown."""
    sizes = SETTINGS[setting]
    command = [
        sys.executable, "-m", "recpipe", "task=profile", f"task.warmup={WARMUP}", f"task.steps={steps}",
        "data=npy", f"data.path={data}", f"data.cache_dir={data}", "data.eval_fraction=0.0",
        f"data.tables={json.dumps(TABLES).replace(chr(34), '')}", f"data.batch_size={sizes['batch']}",
        f"model.embedding_dim={sizes['dim']}", f"model.bottom={sizes['bottom']}", f"model.top={sizes['top']}",
        "trainer.progress=false", f"hydra.run.dir={run_dir.absolute()}", *overrides,
    ]  # fmt: skip
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
