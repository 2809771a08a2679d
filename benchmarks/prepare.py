"""How fast raw Criteo text is prepared, in how much memory, and how fast the loaders are alone.

    python benchmarks/prepare.py [--rows 250000] [--runs 5]

Makes its own text (rows like Criteo's: about 240 bytes, some values missing) in a temporary folder, at one
and at four times ``--rows``, plain and packed. Every figure is a median over runs, with the lowest and the
highest; the runs of all cases take turns. Each preparation has a process of its own, whose peak memory beyond
what it held before is what the table shows. Rates are for one core where the machine lets us pin one.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.table import Table

CASES = (("plain", 1), ("plain", 4), ("gz", 4), ("zst", 4))
TABLES = {f"C{index}": 100_000 for index in range(1, 27)}


def make_text(rows: int) -> bytes:
    """``rows`` rows in Criteo's format; ids have 8 hexadecimal digits, some fields are empty."""
    rng = np.random.default_rng(0)
    dense = np.exp(rng.exponential(2.0, (rows, 13))).astype(np.int64)
    ids = rng.integers(0, 2**32, (rows, 26), dtype=np.int64)
    missing = rng.random((rows, 39)) < 0.12
    lines = []
    for row in range(rows):
        fields = [*map(str, dense[row].tolist()), *(f"{key:08x}" for key in ids[row].tolist())]
        shown = ["" if gone else field for gone, field in zip(missing[row].tolist(), fields, strict=True)]
        lines.append("\t".join([str(row % 4 // 3), *shown]))
    return ("\n".join(lines) + "\n").encode()


def make_files(folder: Path, rows: int) -> dict[tuple[str, int], Path]:
    """The input files of all cases; 20,000 rows over and over, for only their length matters."""
    unit = min(rows, 20_000)
    text = make_text(unit)
    files = {}
    for kind, times in CASES:
        copies = rows * times // unit
        path = folder / f"{times}x.tsv"
        if kind == "gz":
            path = path.with_suffix(".tsv.gz")
            path.write_bytes(gzip.compress(text, 6) * copies)
        elif kind == "zst":
            path = path.with_suffix(".tsv.zst")
            with pa.CompressedOutputStream(str(path), "zstd") as stream:
                for _ in range(copies):
                    stream.write(text)
        else:
            with path.open("wb") as file:
                for _ in range(copies):
                    file.write(text)
        files[kind, times] = path
    return files


def memory(key: str) -> int:
    """Bytes of ``VmRSS`` (now) or ``VmHWM`` (peak) of this process; Linux."""
    return int(Path("/proc/self/status").read_text().split(f"{key}:")[1].split()[0]) * 1024


def child(file: Path, cache_dir: Path) -> None:
    """Prepare ``file`` and print rows, seconds and peak memory above the start as JSON."""
    from recpipe.data.config import CriteoConfig
    from recpipe.data.make import open_dataset

    config = CriteoConfig(path=str(file), cache_dir=str(cache_dir), tables=TABLES, eval_fraction=0.0)
    Path("/proc/self/clear_refs").write_text("5")
    before, started = memory("VmRSS"), time.perf_counter()
    dataset = open_dataset(config, 0)
    seconds = time.perf_counter() - started
    print(json.dumps({"rows": dataset.size("train"), "seconds": seconds, "peak": memory("VmHWM") - before}))


def prepare_once(file: Path) -> dict[str, float]:
    """One preparation in a fresh process and a fresh cache."""
    with tempfile.TemporaryDirectory() as cache_dir:
        arguments = [sys.executable, "-W", "ignore", __file__, "--child", str(file), cache_dir]
        result = subprocess.run(arguments, capture_output=True, text=True, check=True)
    figures: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return figures


def loader_rates(file: Path, cache_dir: Path, runs: int) -> dict[str, list[float]]:
    """Samples per second of each loader alone, batches of 2,048, the page cache warm."""
    from recpipe.data.config import CriteoConfig, SyntheticConfig
    from recpipe.data.make import open_dataset

    criteo = CriteoConfig(path=str(file), cache_dir=str(cache_dir), tables=TABLES, eval_fraction=0.0)
    sources = {
        "prepared Criteo rows": open_dataset(criteo, 0),
        "prepared Criteo rows, data.shuffle=all": open_dataset(replace(criteo, shuffle="all"), 0),
        "synthetic, generated": open_dataset(SyntheticConfig(samples=400_000, eval_fraction=0.0), 0),
    }
    rates: dict[str, list[float]] = {name: [] for name in sources}
    for run in range(runs + 1):
        for name, dataset in sources.items():
            started = time.perf_counter()
            samples = sum(batch.size for batch in dataset.batches("train", 2048))
            if run:  # the first one warms up
                rates[name].append(samples / (time.perf_counter() - started))
    return rates


def spread(values: list[float], show: Callable[[float], str]) -> str:
    """Median (lowest to highest)."""
    return f"{show(statistics.median(values))} ({show(min(values))} to {show(max(values))})"


def main() -> None:
    """Measure all and print two tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=250_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--child", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    if options.child:
        child(*options.child)
        return
    console = Console()
    with tempfile.TemporaryDirectory() as name:
        files = make_files(Path(name), options.rows)
        runs: dict[tuple[str, int], list[dict[str, float]]] = {case: [] for case in CASES}
        for _ in range(options.runs):
            for case in CASES:
                runs[case].append(prepare_once(files[case]))
        rates = loader_rates(files["plain", 1], Path(name) / "cache", options.runs)
    table = Table("input", "rows", "rows/s", "peak MiB", title="Preparation, one core")
    for (kind, times), figures in runs.items():
        speed = spread([item["rows"] / item["seconds"] for item in figures], "{:,.0f}".format)
        peak = spread([item["peak"] / 2**20 for item in figures], "{:.0f}".format)
        table.add_row(f"{kind}, {times}x", f"{figures[0]['rows']:,.0f}", speed, peak)
    console.print(table)
    table = Table("loader", "samples/s, batches of 2,048", title="Loaders alone, one core")
    for name, values in rates.items():
        table.add_row(name, spread(values, "{:,.0f}".format))
    console.print(table)


if __name__ == "__main__":
    main()
