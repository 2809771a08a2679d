"""How much of a disk's random-read rate the SSD store reaches: its ``gather`` against ``fio``, interleaved.

    python benchmarks/ssd_store.py --directory DIR_ON_THE_DISK [--gib 1] [--json FILE]

Both read the same file in turn (fio: libaio, 4 KiB, queue depth 64, O_DIRECT). A call of the store's gathers
rows in random order, no two in one block, and verifies their checksums; so one row is one 4 KiB read.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recpipe.errors import UserError
from recpipe.plugin.store import Fill, StoreLayout
from recpipe.tables.stores.ssd import SsdStore

BLOCK = 4096
Sample = dict[str, float]


def main() -> int:
    """Run the benchmark; 0 if it ran, 2 with one line on stderr where it cannot."""
    options = _options()
    if shutil.which("fio") is None:
        print(
            "skipped: fio is not installed (apt-get install fio, or your system's package)", file=sys.stderr
        )
        return 2
    try:
        with tempfile.TemporaryDirectory(dir=options.directory, prefix="recpipe-ssd-") as directory:
            result = _measure(options, Path(directory))
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    _print(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--directory", type=Path, default=Path(), help="on the disk to measure (default: here)"
    )
    parser.add_argument("--gib", type=float, default=1.0, help="size of the file (default 1)")
    parser.add_argument("--width", type=int, default=17, help="float32 words of a record (default 17)")
    parser.add_argument("--rows", type=int, default=4096, help="rows of a call (default 4096)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement (default 2)")
    parser.add_argument("--repeats", type=int, default=7, help="rounds of fio, gather, scatter (default 7)")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    return parser.parse_args()


def _measure(options: argparse.Namespace, directory: Path) -> dict[str, object]:
    per_block = BLOCK // (4 * options.width + 4)
    layout = StoreLayout(("table",), (int(options.gib * 2**30) // BLOCK * per_block,), options.width)
    store = SsdStore.create(layout, _random_records(options.width), directory)
    rng = np.random.default_rng(0)
    rounds: dict[str, list[Sample]] = {"fio": [], "gather": [], "scatter": [], "scatter_unstaged": []}
    for _ in range(options.repeats):
        rounds["fio"].append(_fio(directory / "0-table.rows", options.seconds))
        rounds["gather"].append(_calls(store, options, rng, per_block, "g"))
        rounds["scatter"].append(_calls(store, options, rng, per_block, "gs"))
        rounds["scatter_unstaged"].append(_calls(store, options, rng, per_block, "s"))
    result: dict[str, object] = {
        "file_bytes": store.cold_bytes,
        "width": options.width,
        "rows_per_call": options.rows,
        "direct": store.direct,
        "engine": store.engine,
        "overhead_bytes": store.overhead_bytes,
        "rounds": rounds,
    }
    store.close()
    return result


def _random_records(width: int) -> Fill:
    rng = np.random.default_rng(0)
    return lambda _, start, stop: rng.standard_normal((stop - start, width), np.float32)


def _fio(path: Path, seconds: float) -> Sample:
    """IOPS and CPU microseconds per read of fio on the store's own file."""
    command = ["fio", "--name=randread", f"--filename={path}", "--readonly", "--rw=randread", "--bs=4k"]
    command += ["--iodepth=64", "--direct=1", "--ioengine=libaio", "--time_based", f"--runtime={seconds}"]
    done = subprocess.run([*command, "--output-format=json"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"fio failed: {done.stderr.strip().splitlines()[-1:]}")
    job = json.loads(done.stdout)["jobs"][0]
    rate = float(job["read"]["iops"])
    return {"rows_per_second": rate, "cpu_us_per_row": 1e4 * (job["usr_cpu"] + job["sys_cpu"]) / rate}


def _calls(
    store: SsdStore, options: argparse.Namespace, rng: np.random.Generator, per_block: int, what: str
) -> Sample:
    """Rate and CPU cost of gathers ("g"), of scatters ("s"), of the scatters after gathers ("gs")."""
    out = np.zeros((options.rows, options.width), np.float32)
    spent = cpu = 0.0
    rows_moved, end = 0, time.perf_counter() + options.seconds
    while time.perf_counter() < end:
        rows = _one_per_block(store.layout.total_rows // per_block, options.rows, per_block, rng)
        if what == "gs":
            store.gather(rows, out)
        began, cpu_before = time.perf_counter(), _cpu_seconds()
        if what == "g":
            store.gather(rows, out)
        else:
            store.scatter(rows, out)
        spent += time.perf_counter() - began
        cpu += _cpu_seconds() - cpu_before
        rows_moved += len(rows)
    return {"rows_per_second": rows_moved / spent, "cpu_us_per_row": 1e6 * cpu / rows_moved}


def _one_per_block(blocks: int, count: int, per_block: int, rng: np.random.Generator) -> NDArray[np.int64]:
    chosen = rng.choice(blocks, count, replace=False).astype(np.int64)
    return chosen * per_block + rng.integers(0, per_block, count)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _print(result: dict[str, object]) -> None:
    rounds = result["rounds"]
    assert isinstance(rounds, dict)
    print(f"file {result['file_bytes']} bytes, direct={result['direct']}, engine={result['engine']}")
    print(f"{'':18}{'rows/s: median (min..max)':>32}   {'CPU us per row':>14}")
    for name, samples in rounds.items():
        rates = [sample["rows_per_second"] for sample in samples]
        cost = statistics.median(sample["cpu_us_per_row"] for sample in samples)
        print(f"{name:18}{_spread(rates, '.0f'):>32}   {cost:14.2f}")
    pairs = zip(rounds["gather"], rounds["fio"], strict=True)
    ratios = [ours["rows_per_second"] / fio["rows_per_second"] for ours, fio in pairs]
    result["ratio_gather_to_fio"] = {
        "median": statistics.median(ratios),
        "min": min(ratios),
        "max": max(ratios),
    }
    print(f"{'gather / fio':18}{_spread(ratios, '.3f'):>32}")


def _spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}}..{max(values):{form}})"


if __name__ == "__main__":
    sys.exit(main())
