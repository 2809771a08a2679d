"""How fast very many rows of Parquet are prepared, in how much memory, beside a scan of them by pyarrow.

    python benchmarks/prepare_large.py [--rows 100000000] [--part 2000000] [--distinct 5] [--folder DIR]
        [--cases "scan, one thread" scan "prepare hash"]

Generated rows (those of ``prepare_learned.py``: a label, five columns of ids, one of them text, and four of
numbers) in ``--distinct`` files of ``--part`` rows each, which are listed again and again until there are
``--rows``: so they are made in seconds, and after the first round they are read from memory, by the scan and
by preparation alike. In DIR (default: the temporary folder), 10 million of them take 0.6 GB, and 100 million
prepared ones 4.5 GB, which are removed after each case; "prepare vocabulary" and "prepare all" take as much
again meanwhile. A scan reads and decodes all columns, batch by batch, on one thread and on all. Each line is
one process; memory is what it has beyond that at its start, at most: all that is its own, and with the pages
of files that it has mapped, which the system may take back. With ten times as many rows it should stay what
it is.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from importlib import import_module
from pathlib import Path

import pyarrow.dataset
import pyarrow.parquet as pq
from prepare import memory
from prepare_learned import features, make_table
from rich.console import Console
from rich.table import Table

CASES = ("scan, one thread", "scan", "prepare hash")


class Peak(threading.Thread):
    """Watches how much memory this process takes beyond what it had."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._start = [memory(key) for key in ("RssAnon", "VmRSS")]
        self.own = self.whole = 0
        self.start()

    def run(self) -> None:
        """Look every 20 ms, until the process ends."""
        while True:
            own, whole = (memory(key) for key in ("RssAnon", "VmRSS"))
            self.own, self.whole = (
                max(self.own, own - self._start[0]),
                max(self.whole, whole - self._start[1]),
            )
            time.sleep(0.02)


def scan(files: list[str], threads: bool) -> int:
    """The rows of all files, every column decoded."""
    batches = pyarrow.dataset.dataset(files).to_batches(use_threads=threads, fragment_readahead=2)
    return sum(len(batch) for batch in batches)


def prepare(files: list[str], case: str, folder: Path) -> int:
    """The rows that are prepared into an empty cache."""
    from recpipe.data.config import FilesConfig
    from recpipe.data.make import open_dataset

    with tempfile.TemporaryDirectory(dir=folder.parent) as cache:
        config = FilesConfig(path=files, features=features(case), cache_dir=cache, cache_bytes="90%")
        dataset = open_dataset(config, 0)
        return dataset.size("train") + dataset.size("eval")


def child(folder: Path, case: str, times: int) -> None:
    """Carry out a case, and print rows, seconds and memory as JSON."""
    import_module("recpipe.data.make")  # which is not what a case takes
    kind, _, rest = case.partition(" ")
    files = sorted(map(str, folder.iterdir())) * times
    peak, started = Peak(), time.perf_counter()
    rows = prepare(files, rest, folder) if kind == "prepare" else scan(files, case == "scan")
    seconds = time.perf_counter() - started
    print(json.dumps({"rows": rows, "seconds": seconds, "own": peak.own, "whole": peak.whole}))


def make_files(folder: Path, part: int, count: int) -> None:
    """The input files."""
    folder.mkdir()
    for number in range(count):
        table = make_table(part, seed=number)
        pq.write_table(table, folder / f"part-{number:04}.parquet", row_group_size=1 << 17)


def main() -> None:
    """Measure all cases, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=100_000_000)
    parser.add_argument("--part", type=int, default=2_000_000)
    parser.add_argument("--distinct", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    times = max(1, options.rows // (options.part * options.distinct))
    if options.child:
        child(options.folder, options.child, times)
        return
    console = Console()
    shown = Table("case", "rows", "rows/s", "own MiB", "with mapped files", title="Parquet, all columns")
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name) / "rows"
        make_files(folder, options.part, options.distinct)
        sizes = [f"--{key}={getattr(options, key)}" for key in ("rows", "part", "distinct")]
        for case in options.cases:
            words = [sys.executable, "-W", "ignore", __file__, "--folder", str(folder), *sizes]
            result = subprocess.run([*words, "--child", case], capture_output=True, text=True, check=True)
            found = json.loads(result.stdout.splitlines()[-1])
            memory_used = [f"{found[key] / 2**20:,.0f}" for key in ("own", "whole")]
            shown.add_row(
                case, f"{found['rows']:,}", f"{found['rows'] / found['seconds']:,.0f}", *memory_used
            )
    console.print(shown)


if __name__ == "__main__":
    main()
