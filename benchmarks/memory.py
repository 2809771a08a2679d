"""How much memory a run takes over that of its tables: made, trained, saved, resumed, exported, read back.

    python benchmarks/memory.py [--gb 10] [--dim 64] [--tables 4] [--dir DIR] [--json FILE] [OVERRIDE ...]

Each figure is of a process of its own: its peak RSS as wait4 gives it (pages of mapped files that are in its
memory count, the page cache does not), and that over the tables' bytes: whole, and less the peak of the same
run with tables of 100 rows. `anon` and `file` are the largest RssAnon and RssFile seen every 20 ms. The
tables' bytes are those in the checkpoint: weights and optimizer state (--gb counts row-wise Adagrad's).

    train       first values, 3 steps, a checkpoint
    resume      from that checkpoint, 1 step
    unshard     the checkpoint to one safetensors file
    pretrained  model.pretrained from that file, 1 step

Takes twice the tables' bytes in DIR (default: the temporary folder), and removes them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, sleep

SAMPLES = 4096
STEPS = 3


@dataclass
class Peak:
    """Bytes at most in the memory of one process, and its seconds."""

    rss: int
    anon: int
    file: int
    seconds: float


def measured(arguments: list[str], log: Path) -> Peak:
    """Run recpipe to its end, its output in ``log``."""
    started = perf_counter()
    anon = file = 0
    with log.open("wb") as output:
        run = subprocess.Popen([sys.executable, "-m", "recpipe", *arguments], stdout=output, stderr=output)
    while True:
        done, status, usage = os.wait4(run.pid, os.WNOHANG)
        if done:
            break
        sizes = dict(_sizes(run.pid))
        anon, file = max(anon, sizes.get("RssAnon", 0)), max(file, sizes.get("RssFile", 0))
        sleep(0.02)
    run.returncode = os.waitstatus_to_exitcode(status)
    if run.returncode:
        sys.exit(f"recpipe {' '.join(arguments)} failed:\n{log.read_text()[-2000:]}")
    return Peak(usage.ru_maxrss * 1024, anon, file, perf_counter() - started)


def _sizes(pid: int) -> Iterator[tuple[str, int]]:
    """RssAnon and RssFile in bytes; nothing of a process that has just ended."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(("RssAnon:", "RssFile:")):
            name, kib, _ = line.split()
            yield name[:-1], int(kib) * 1024


def recipe(rows: int, tables: int, dim: int, run_dir: Path, overrides: list[str]) -> list[str]:
    """Generated clicks over ``tables`` tables of ``rows`` rows, a small dense part."""
    names = ", ".join(f"T{index}: {rows}" for index in range(tables))
    return [
        f"data.tables={{{names}}}", f"data.samples={SAMPLES}", "data.batch_size=512",
        f"model.embedding_dim={dim}", "model.bottom=[64]", "model.top=[64]",
        "trainer.progress=false", "trainer.logger=null", f"hydra.run.dir={run_dir}", *overrides,
    ]  # fmt: skip


def measure(
    rows: int, tables: int, dim: int, work: Path, overrides: list[str]
) -> tuple[dict[str, Peak], int]:
    """The peaks of all four, with tables of ``rows`` rows; and the tables' bytes."""
    work.mkdir()
    common = recipe(rows, tables, dim, work / "run", overrides)
    checkpoints, exported, log = work / "checkpoints", work / "model.safetensors", work / "log"
    saving = [f"trainer.max_steps={STEPS}", f"trainer.checkpoint_every={STEPS}"]
    peaks = {"train": measured([*common, *saving, f"trainer.checkpoint_dir={checkpoints}"], log)}
    table_bytes = sum(file.stat().st_size for file in checkpoints.glob("*/tables/*"))
    alone = [*common, "trainer.checkpoint_every=null"]
    peaks["resume"] = measured([*alone, f"trainer.max_steps={STEPS + 1}", f"resume={checkpoints}"], log)
    peaks["unshard"] = measured(["unshard", str(checkpoints), str(exported)], log)
    shutil.rmtree(checkpoints)
    peaks["pretrained"] = measured([*alone, "trainer.max_steps=1", f"model.pretrained={exported}"], log)
    shutil.rmtree(work)
    return peaks, table_bytes


def show(peaks: dict[str, Peak], base: dict[str, Peak], table_bytes: int) -> None:
    """The table."""
    heads = ("peak GB", "/ tables", "less base", "anon GB", "file GB", "seconds")
    print(f"{table_bytes / 1e9:.2f} GB of tables")
    print(f"{'':<12}" + "".join(f"{head:>12}" for head in heads))
    for name, peak in peaks.items():
        ratios = peak.rss / table_bytes, (peak.rss - base[name].rss) / table_bytes
        figures = (peak.rss / 1e9, *ratios, peak.anon / 1e9, peak.file / 1e9, peak.seconds)
        print(f"{name:<12}" + "".join(f"{figure:>12.2f}" for figure in figures))


def main() -> None:
    """Measure small tables and then large ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gb", type=float, default=10.0)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--tables", type=int, default=4)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    record = 4 * (arguments.dim + 1)
    rows = round(arguments.gb * 1e9 / record / arguments.tables)
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        if shutil.disk_usage(folder).free < 2.5e9 * arguments.gb:
            sys.exit(f"{folder} has not {2.5 * arguments.gb:.0f} GB free; choose another --dir")
        sizes = (arguments.tables, arguments.dim)
        base, _ = measure(100, *sizes, Path(folder, "base"), arguments.overrides)
        peaks, table_bytes = measure(rows, *sizes, Path(folder, "full"), arguments.overrides)
    show(peaks, base, table_bytes)
    if arguments.json:
        found = {"table_bytes": table_bytes, "peaks": {name: asdict(peak) for name, peak in peaks.items()}}
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
