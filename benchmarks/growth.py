"""How a step's time and a run's memory grow with batch size, rows, tables, dimension, pooling factor, rows
on a disk, and ranks.

    python benchmarks/growth.py FOLDER [--axis batch] [--repetitions 3] [--json DIRECTORY] [OVERRIDE ...]
    python benchmarks/growth.py FOLDER --axis cold tiers.policy=lfu

One of them is changed at a time; the others stay at 2,048 samples, 8 tables of 100,000 rows, dimension 32
and one id a feature, but for what ``AXES`` says. ``cold``: one table of up to a thousand million rows in
files, of which 64 MiB are cached; that takes 24 bytes of disk and 4 of memory a row, and a point for which
there is no room is left out and said. ``ranks``: processes that share 2,048 samples and the tables. Each
point is a run of its own, on generated ids (their skew is that of data=synthetic) that were written to
parquet files and prepared beforehand; the runs of an axis take turns, and one that takes longer than a minute
is not repeated. Time is the median step's, the median of the repetitions: of a step against batch size, of a
sample against the rest. Memory is the peak RSS (of the first rank), the median, less that of a run with
tables of 100 rows and batches of 64. Host bytes a row are all memory of tiers beside the cached rows, over
the table's rows: with few rows most of it is the cache's own.

FOLDER keeps the points that are done, so that the same command goes on where it was stopped; a run's rows are
removed once it has ended. ``--json``: a folder whose growth.json, which docs/tables.py shows, gets the rows
of this axis in place of those that it had.

`growth` is the slope between a point and the one before in logarithms: 1 is linear, 0 is flat; `operations`
is that of the model's own multiplications. A slope of time above both 1.1 and the operations' is a cliff, and
so is one against rows above 0.5 (a row costs the same however many there are, but for caches that no longer
hold them). Of a cliff the last column tells what grew: for rows on a disk what training waits for them, for
ranks what a step spends in messages, for the rest the phases of ``task=profile``, which runs both points
again. A DLRM's operations grow faster than its tables: F of them have F (F + 1) / 2 products, which are the
top MLP's input, and so tables are counted with cross layers.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

STEPS, WARMUP = 40, 10
DENSE = 13
LINEAR, FLAT = 1.1, 0.5
"""Growth above which a point is a cliff."""
NOISE = 128 << 20
"""Memory below which growth says nothing."""
LONG = 60.0
"""Seconds of a run above which it is not repeated."""
ROOM = 1.2
"""A point is run if there is so many times the disk and memory that it takes."""
TOLD = 3
"""How many phases a cliff names."""
COLUMNS = {
    "size": None,
    "value": "{:,.0f}",
    "us a step (batch) or a sample": "{:,.2f}",
    "growth": "{:.2f}",
    "growth of operations": "{:.2f}",
    "memory MiB": "{:,.0f}",
    "growth of memory": "{:.2f}",
    "host bytes a row": "{:.2f}",
    "others took": "{:.0%}",
    "what grew at a cliff": None,
}
Known = dict[str, dict[str, Any]]
"""What each run gave, by its name."""


@dataclass(frozen=True)
class Point:
    """Sizes of one run."""

    batch: int = 2048
    rows: int = 100_000
    tables: int = 8
    dim: int = 32
    pooling: int = 1
    ranks: int = 1

    @property
    def samples(self) -> int:
        """Of the data: several batches, so that one fetches no cached rows of the one before."""
        return max(16_384, 4 * self.batch)

    @property
    def features(self) -> list[str]:
        """Names of the tables."""
        return [f"C{index}" for index in range(self.tables)]


@dataclass(frozen=True)
class Axis:
    """What is changed, over which values, and what the other sizes and keys are meanwhile."""

    name: str
    values: tuple[int, ...]
    size: str
    """The field of ``Point`` that is changed."""
    others: Point = Point()
    words: tuple[str, ...] = ()
    limit: float = LINEAR
    """Growth of time that is too much."""

    @property
    def points(self) -> list[Point]:
        return [replace(self.others, **{self.size: value}) for value in self.values]


ON_DISK = ("tiers.store=ssd", "tiers.policy=lru", "tiers.resident_bytes=64MiB")
CROSSES = ("model=dlrm_dcn", "model.cross_layers=2", "model.cross_rank=16", "model.top=[64]")
TEN = (10**6, 10**7, 10**8, 10**9)
AXES = {
    "batch": Axis("batch size", (128, 512, 2048, 8192, 32_768, 65_536), "batch"),
    "rows": Axis("rows of each table", (10_000, 40_000, 160_000, 640_000, 2_560_000), "rows", limit=FLAT),
    "tables": Axis("tables", (26, 100, 400, 800), "tables", Point(rows=10_000, dim=16), CROSSES),
    "dim": Axis("embedding dimension", (8, 16, 32, 64, 128), "dim"),
    "pooling": Axis("pooling factor (ids of a bag, on average)", (1, 2, 4, 8, 16, 32), "pooling"),
    "cold": Axis("rows of the table on a disk", TEN, "rows", Point(tables=1, dim=4), ON_DISK, FLAT),
    "ranks": Axis("ranks", (1, 2, 4, 8), "ranks", words=("tiers.sharded=true",), limit=FLAT),
}
BASE = Point(batch=64, rows=100)


def operations(point: Point, overrides: Sequence[str]) -> float:
    """Of a step's matrix products, forward and backward."""
    from recpipe.config.compose import compose
    from recpipe.config.recipe import Recipe
    from recpipe.profiling.workload import dense_work

    words = [word for word in overrides if word.startswith("model")]
    model = Recipe.of(compose([*words, f"model.embedding_dim={point.dim}"])).model
    return sum(work.flops for work in dense_work(model, DENSE, point.tables, point.batch).values())


def write_data(point: Point, directory: Path) -> None:
    """The samples of ``point`` as a parquet file, unless it is there."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from recpipe.data.config import SyntheticConfig
    from recpipe.data.sources.synthetic import SyntheticDataset

    if directory.exists():
        return
    config = SyntheticConfig(
        samples=point.samples,
        eval_fraction=0.0,
        tables=dict.fromkeys(point.features, point.rows),
        pooling=point.pooling,
    )
    columns = SyntheticDataset(config, seed=1).columns(0, point.samples)
    arrays = {"label": pa.array(columns.labels.astype("int8"))}
    arrays |= {f"I{index}": pa.array(values) for index, values in enumerate(columns.dense.T)}
    one_hot = [name for name in point.features if name not in columns.bags]
    arrays |= {name: pa.array(ids) for name, ids in zip(one_hot, columns.ids.T, strict=True)}
    for name, bags in columns.bags.items():
        own = bags.trimmed()
        arrays[name] = pa.ListArray.from_arrays(pa.array(own.offsets.astype("int32")), pa.array(own.values))
    made = directory.with_suffix(".made")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    pq.write_table(pa.table(arrays), made / "samples.parquet")
    made.rename(directory)


def run(point: Point, work: Path, overrides: Sequence[str], task: Sequence[str] = ()) -> dict[str, Any]:
    """One run of ``point``; its report."""
    data = work / f"{point.samples}-{point.rows}-{point.tables}-{point.pooling}"
    write_data(point, data)
    launcher = ["torch.distributed.run", f"--nproc-per-node={point.ranks}", "-m"] if point.ranks > 1 else []
    command = [
        sys.executable, "-m", *launcher, "recpipe", "data=parquet", f"data.path={data}",
        f"data.cache_dir={work / 'cache'}", "data.label=label",
        f"data.dense=[{','.join(f'I{index}' for index in range(DENSE))}]",
        f"data.sparse=[{','.join(point.features)}]", f"data.table_rows={point.rows}", "data.hash_ids=false",
        "data.dense_transform=none", "data.eval_fraction=0.0", f"data.batch_size={point.batch}",
        f"model.embedding_dim={point.dim}", f"trainer.max_steps={STEPS}", "trainer.max_epochs=1000",
        "trainer.checkpoint_every=null", "trainer.progress=false", "trainer.logger=null",
        f"hydra.run.dir={work / 'run'}", *overrides, *task,
    ]  # fmt: skip
    shutil.rmtree(work / "run", ignore_errors=True)  # an interrupted run has left its rows there
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        report: dict[str, Any] = json.loads((work / "run" / "report.json").read_text())
    finally:
        shutil.rmtree(work / "run", ignore_errors=True)
    return report


def figures(point: Point, work: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """What is kept of a run."""
    began = time.perf_counter()
    report = run(point, work, overrides)
    throughput, memory, io = report["throughput"], report["memory"], report["io"] or {}
    return {
        "us": throughput["step_ms"]["p50"] * 1e3,
        "rss": memory["peak_rss_bytes"],
        "host_bytes": memory["tier_overhead_bytes"],
        "others": throughput["others_cpu_share"],
        "waited_us": io.get("wait_seconds", 0.0) / STEPS * 1e6,
        "messages_us": report["ranks"]["message_seconds"] / STEPS * 1e6,
        "seconds": time.perf_counter() - began,
        "environment": report["environment"],
    }


def phases(point: Point, work: Path, overrides: Sequence[str]) -> dict[str, float]:
    """Microseconds of each phase of a step."""
    task = ["task=profile", f"task.warmup={WARMUP}", f"task.steps={STEPS}"]
    told = run(point, work, overrides, task)["profile"]["phases"]
    return {name: 1e3 * phase["ms"] for name, phase in told.items() if phase["ms"] is not None}


def lacking(point: Point, axis: str, folder: Path) -> str | None:
    """What there is no room for; None: there is."""
    from recpipe.common.machine import free_memory

    if axis != "cold":
        return None
    record = 4 * (point.dim + 2)  # its weights, their state and a checksum
    for what, takes, there in (
        ("disk", record * point.rows, shutil.disk_usage(folder).free),
        ("memory", 4 * point.rows, free_memory()),
    ):
        if takes * ROOM > there:
            return f"{point.rows:,} rows take {takes / 2**30:.0f} GiB of {what}, {there / 2**30:.0f} are free"
    return None


def sweep(name: str, folder: Path, repetitions: int, overrides: Sequence[str]) -> list[list[Any]]:
    """The rows of the table for an axis."""
    axis, known = AXES[name], Known()
    words = [*axis.words, *overrides]
    file = folder / "points.json"
    if file.exists():
        known = json.loads(file.read_text())

    def kept(label: str, made: Any) -> dict[str, Any]:
        key = " ".join([name, label, *words])
        if key not in known:
            known[key] = made()
            file.write_text(json.dumps(known, indent=1))
        return known[key]

    if not known:
        run(BASE, folder, overrides)  # the first one may measure what is fast on this machine
    base = kept("base", partial(figures, BASE, folder, overrides))
    points = []
    for point in axis.points:
        without = lacking(point, name, folder)
        if without is None or " ".join([name, f"{asdict(point)} 0", *words]) in known:
            points.append(point)
        else:
            print(f"left out: {without}", flush=True)
    rounds: dict[Point, list[dict[str, Any]]] = {point: [] for point in points}
    for number in range(repetitions):
        for point in points:
            if number == 0 or rounds[point][0]["seconds"] < LONG:
                once = partial(figures, point, folder, words)
                rounds[point].append(kept(f"{asdict(point)} {number}", once))
    table: list[list[Any]] = []
    before: list[Any] = []
    for point in points:
        per = 1 if name == "batch" else point.batch
        own = rounds[point]
        us = [each["us"] / per for each in own]
        memory = median(each["rss"] for each in own) - base["rss"]
        now = [getattr(point, axis.size), median(us), operations(point, words) / per, memory, point]
        slopes = [slope(before, now, 1), slope(before, now, 2), slope(before, now, 3, NOISE)]
        grew = None
        if slopes[0] is not None and slopes[0] > max(axis.limit, slopes[1] or 0.0):
            parts = [
                kept(f"{asdict(p)} parts", partial(parts_of, name, p, folder, words, rounds[p]))
                for p in (before[4], point)
            ]
            grew = told(*parts, *((b[4].batch if name != "batch" else 1) for b in (before, now)))
        host = own[0]["host_bytes"] / point.rows if name == "cold" else None
        shares = [each["others"] for each in own if each["others"] is not None]
        others = median(shares) if shares else None
        table.append(
            [name, now[0], {"rounds": us}, *slopes[:2], memory / 2**20, slopes[2], host, others, grew]
        )
        print(
            "".join(
                f"{cell(value, form):>18}" for value, form in zip(table[-1], COLUMNS.values(), strict=True)
            ),
            flush=True,
        )
        before = now
    return table


def parts_of(
    name: str, point: Point, folder: Path, words: Sequence[str], rounds: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Microseconds of the parts of a step of ``point``."""
    if name == "cold":
        return {"waiting for rows": median(each["waited_us"] for each in rounds)}
    if name == "ranks":
        return {"messages": median(each["messages_us"] for each in rounds)}
    return phases(point, folder, words)


def told(before: Mapping[str, float], after: Mapping[str, float], per: int, now_per: int) -> str:
    """The parts that grew most, from what to what."""
    growth = {part: value / now_per - before.get(part, 0.0) / per for part, value in after.items()}
    most = sorted((part for part in growth if growth[part] > 0), key=lambda part: -growth[part])[:TOLD]
    return "; ".join(
        f"{part} {before.get(part, 0.0) / per:,.2f} to {after[part] / now_per:,.2f} us" for part in most
    )


def slope(before: Sequence[Any], now: Sequence[Any], which: int, least: float = 0.0) -> float | None:
    """Of a figure, in logarithms, to the point before; None for the first and below ``least``."""
    if not before or min(before[which], now[which]) <= least:
        return None
    return math.log(now[which] / before[which]) / math.log(now[0] / before[0])


def cell(value: Any, form: str | None) -> str:
    """As the terminal shows it."""
    if value is None:
        return "-"
    if isinstance(value, dict):
        value = median(value["rounds"])
    return str(value) if form is None else form.format(value)


def keep(path: Path, name: str, table: Sequence[list[Any]], environment: Mapping[str, Any]) -> None:
    """Replace the rows of an axis in a result for docs/tables.py."""
    there = json.loads(path.read_text()) if path.exists() else {"rows": []}
    rows = {axis: [row for row in there["rows"] if row[0] == axis] for axis in AXES} | {name: list(table)}
    result = {
        "title": "Growth",
        "command": "python benchmarks/growth.py FOLDER --axis AXIS --json benchmarks/results",
        "machine": f"{environment['cores']} cores of {environment['cpu']}, a virtual machine",
        "commit": (environment["commit"] or "")[:8],
        "date": date.today().isoformat(),
        "kept": "the median step of each round, too long where others took a large share of the processors; "
        "rows without a share are of 2026-11-23, commit 3e7dcc1",
        "columns": COLUMNS,
        "rows": [row for axis in AXES for row in rows[axis]],
    }
    path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    """Sweep the axes, print their tables and keep them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--axis", action="append", choices=tuple(AXES), help="one of them; may be repeated")
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_intermixed_args()
    folder = arguments.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    for name in arguments.axis or AXES:
        print("".join(f"{heading[:17]:>18}" for heading in COLUMNS), flush=True)
        table = sweep(name, folder, arguments.repetitions, arguments.overrides)
        if arguments.json:
            known = json.loads((folder / "points.json").read_text())
            keep(arguments.json / "growth.json", name, table, next(iter(known.values()))["environment"])


if __name__ == "__main__":
    main()
