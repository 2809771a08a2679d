"""Does memory grow? Long runs of each plugin, their resident set sampled from outside.

    python benchmarks/soak.py [--steps 10000] [--rows lru bagpipe ...] [OVERRIDE ...]

A run's caches fill at first, so growth is counted from the second quarter of the samples to the
last: the median of each. Exits with 1 if a run grows by more than ``--limit`` MiB.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROWS = ["lru", "fae", "hotline", "slipstream", "bagpipe", "het"]
POLICIES = ("nocache", "lru", "lfu", "resident")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rows", nargs="*", default=ROWS, help="policies and plugins, joined by +")
    parser.add_argument("--limit", type=float, default=16.0, help="MiB of growth that are allowed")
    parser.add_argument("overrides", nargs="*", help="further overrides of the recipe")
    arguments = parser.parse_args()
    print("| run | MiB, 2nd quarter | MiB, last quarter | growth |")
    print("|---|---|---|---|")
    grown = 0
    for row in arguments.rows:
        parts = row.split("+")
        policy = [f"tiers.policy={part}" for part in parts if part in POLICIES]
        plugins = [part for part in parts if part not in POLICIES]
        chosen = policy + ([f"+plugin=[{','.join(plugins)}]"] if plugins else [])
        sizes = sample(arguments.steps, [*chosen, *arguments.overrides])
        quarter = len(sizes) // 4
        before, after = median(sizes[quarter : 2 * quarter]), median(sizes[-quarter:])
        print(f"| {row} | {before:.1f} | {after:.1f} | {after - before:+.1f} |", flush=True)
        grown += after - before > arguments.limit
    return 1 if grown else 0


def sample(steps: int, overrides: list[str]) -> list[float]:
    """Resident MiB of a run, twice a second from its first checkpoint on, a tenth of its steps in."""
    recipe = [
        "data.batch_size=64", "data.samples=100000", "data.table_scale=0.2", "tiers.store=ssd",
        "tiers.resident_bytes=10%", "trainer.max_epochs=1000", "trainer.eval_every=1.0",
        "trainer.progress=false",
        f"trainer.checkpoint_every={max(1, steps // 10)}", "trainer.keep_checkpoints=2",
        "trainer.logger=null",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "recpipe",
            *recipe,
            f"trainer.max_steps={steps}",
            *overrides,
            f"hydra.run.dir={folder}/run",
        ]
        with Path(folder, "log").open("wb") as log:
            run = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        sizes = []
        while run.poll() is None:
            if Path(folder, "run", "checkpoints").exists():  # the start is over
                sizes.append(resident_mib(run.pid))
            time.sleep(0.5)
        if run.returncode or len(sizes) < 8:
            sys.exit(Path(folder, "log").read_text())
        return sizes


def resident_mib(pid: int) -> float:
    """Of one process; 0 when it has just ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    return next(
        (int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmRSS")), 0.0
    )


if __name__ == "__main__":
    sys.exit(main())
