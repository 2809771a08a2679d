"""Where recpipe's step goes, against what this machine could do at best: task=profile at two sizes of a DLRM.

    python benchmarks/floor.py [--settings small large] [--steps 30] [--dir DIR] [override ...]

On the work of benchmarks/peers. Each setting is one run; its tables are printed, and its report.html,
report.json and trace stay in DIR/SETTING where --dir is given. Overrides go to every run:
model.precision=bfloat16.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "peers"))
from recpipe_cli import recipe
from work import SETTINGS, write

WARMUP = 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=["small", "large"])
    parser.add_argument("--steps", type=int, default=30, help="that are timed, and again so many profiled")
    parser.add_argument("--dir", type=Path, help="where the reports stay")
    arguments, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        for setting in arguments.settings:
            print(f"{setting}: {SETTINGS[setting]}", flush=True)
            data = Path(folder, "data", setting)
            write(data, setting, WARMUP + 2 * arguments.steps)
            run_dir = (arguments.dir or Path(folder)) / setting
            profile(data, run_dir.absolute(), arguments.steps, overrides)


def profile(data: Path, run_dir: Path, steps: int, overrides: list[str]) -> None:
    """One run of task=profile, with its output shown."""
    task = ["task=profile", f"task.warmup={WARMUP}", f"task.steps={steps}", "trainer.progress=false"]
    command = [sys.executable, "-m", "recpipe", *task, *recipe(data, run_dir), *overrides]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
