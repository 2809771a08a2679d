"""How long from `python -m recpipe` to the end of the first trained step, and which imports that goes to.

    python benchmarks/startup.py [--repetitions 5] [--mode warm] [--json FILE] [OVERRIDE ...]
    python benchmarks/startup.py data=criteo data.path=FILE experiment=criteo_small

Each run has a process of its own and trains one step on data that an earlier run, not counted, has prepared.

    warm        byte-compiled modules, files in the page cache
    uncompiled  no module is byte-compiled (an empty PYTHONPYCACHEPREFIX, and none is written)
    cold        uncompiled, and the files of Python and its packages dropped from the page cache beforehand
                (posix_fadvise, which needs no rights; files that another process has mapped stay)

A figure is the time of `python -c pass` under the same conditions plus `throughput.first_step_seconds` of
report.json, which begins at recpipe's first line. Import times are of further runs, to
their very end: each module's least of three.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections import defaultdict
from pathlib import Path
from time import perf_counter
from typing import Any

MODES = ("warm", "uncompiled", "cold")
SHOWN = 20
"""Packages in the table of imports."""
IMPORT_RUNS = 3
_IMPORT = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)")


class Starts:
    """Runs of one recipe under ``MODES``; ``work`` is a scratch folder."""

    def __init__(self, overrides: list[str], work: Path) -> None:
        self.work = work
        recipe = [
            "trainer.max_steps=1",
            "trainer.checkpoint_every=null",
            "task.beside=null",
            "trainer.progress=false",
        ]
        cache = [] if _synthetic(overrides) else [f"data.cache_dir={work / 'cache'}"]
        self.arguments = ["-m", "recpipe", *recipe, *cache, f"hydra.run.dir={work / 'run'}", *overrides]

    def seconds(self, mode: str) -> float:
        """One run, from nothing to its first trained step."""
        if mode == "cold":
            drop_files()
        started = perf_counter()
        self._python(mode, ["-c", "pass"])
        boot = perf_counter() - started
        self._python(mode, self.arguments)
        return boot + float(self.report()["throughput"]["first_step_seconds"])

    def report(self) -> dict[str, Any]:
        """The last run's report.json."""
        content: dict[str, Any] = json.loads((self.work / "run" / "report.json").read_text())
        return content

    def imports(self, mode: str, runs: int) -> dict[str, float]:
        """Seconds spent in each top-level package's own modules; each module's least over the runs."""
        least: dict[str, float] = {}
        for _ in range(runs):
            for micros, module in _IMPORT.findall(self._python(mode, ["-X", "importtime", *self.arguments])):
                least[module] = min(int(micros) / 1e6, least.get(module, math.inf))
        spent: dict[str, float] = defaultdict(float)
        for module, seconds in least.items():
            spent[module.partition(".")[0]] += seconds
        return dict(spent)

    def _python(self, mode: str, arguments: list[str]) -> str:
        """Run Python to its end; what it wrote to stderr."""
        environment = dict(os.environ)
        with tempfile.TemporaryDirectory(dir=self.work) as empty:
            if mode != "warm":
                environment |= {"PYTHONPYCACHEPREFIX": empty, "PYTHONDONTWRITEBYTECODE": "1"}
            command = [sys.executable, *arguments]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        return done.stderr


def _synthetic(overrides: list[str]) -> bool:
    """Generated data, the default, have no cache."""
    return not any(o.startswith("data=") and o != "data=synthetic" for o in overrides)


def drop_files() -> None:
    """Take the files of Python and of its packages out of the page cache."""
    folders = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders |= {Path(sys.base_prefix, "lib"), Path(__file__).resolve().parent.parent / "recpipe"}
    files = {Path(sys.executable).resolve()}
    for folder in folders:
        files |= {file for file in folder.rglob("*") if file.is_file()}
    for file in files:
        try:
            descriptor = os.open(file, os.O_RDONLY)
        except OSError:
            continue
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def show_imports(imports: dict[str, dict[str, float]]) -> None:
    """The packages that take longest, in milliseconds."""
    longest = sorted(imports["uncompiled"].items(), key=lambda item: -item[1])[:SHOWN]
    print(f"\n{'package (own modules)':<24}" + "".join(f"{mode + ' ms':>16}" for mode in imports))
    for package, _ in longest:
        milliseconds = (spent.get(package, 0) * 1e3 for spent in imports.values())
        print(f"{package:<24}" + "".join(f"{figure:>16,.0f}" for figure in milliseconds))
    print(f"{'all':<24}" + "".join(f"{sum(spent.values()) * 1e3:>16,.0f}" for spent in imports.values()))


def main() -> None:
    """Measure, one mode after the other, and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--mode", action="append", choices=MODES, help="one of them; may be repeated")
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    found: dict[str, list[float]] = {mode: [] for mode in arguments.mode or MODES}
    with tempfile.TemporaryDirectory() as folder:
        starts = Starts(arguments.overrides, Path(folder))
        for mode, seconds in found.items():
            starts.seconds("warm")  # prepares the data, and fills the page cache again after cold runs
            seconds += [starts.seconds(mode) for _ in range(arguments.repetitions)]
        imports = {mode: starts.imports(mode, IMPORT_RUNS) for mode in ("warm", "uncompiled")}
        machine = starts.report()["environment"]
    print(f"{machine['cpu']}, {machine['cores']} cores; {' '.join(arguments.overrides) or 'data=synthetic'}")
    print(f"{'seconds to first step':<24}{'median':>16}{'min':>16}{'max':>16}")
    for mode, seconds in found.items():
        figures = (statistics.median(seconds), min(seconds), max(seconds))
        print(f"{mode:<24}" + "".join(f"{figure:>16.2f}" for figure in figures))
    show_imports(imports)
    if arguments.json:
        arguments.json.write_text(json.dumps({"seconds": found, "imports": imports}, indent=1))


if __name__ == "__main__":
    main()
