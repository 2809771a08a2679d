"""How a step's time and a run's memory grow with batch size, rows, tables, dimension, pooling factor, rows
on a disk, and ranks.

    python benchmarks/growth.py [--repetitions 3] [--axis batch] [--html FILE] [--json FILE] [OVERRIDE ...]
    python benchmarks/growth.py --axis cold tiers.policy=lfu

One of them is changed at a time; the others stay at 2,048 samples, 8 tables of 100,000 rows, dimension 32
and one id a feature, but for what ``AXES`` says. ``cold``: one table of up to a thousand million rows in
files, of which 64 MiB are cached. ``ranks``: processes that share 2,048 samples and the tables. Each point is
a run of its own, on generated ids (their skew is that of data=synthetic) that were written to parquet files
and prepared beforehand; the runs of an axis take turns. Time is the median step's, the median of the
repetitions: of a step against batch size, of a sample against the rest. Memory is the peak RSS (of the first
rank), the median, less that of a run with tables of 100 rows and batches of 64.

`growth` is the slope between a point and the one before in logarithms: 1 is linear, 0 is flat; `operations`
is that of the model's own multiplications. A slope of time above both 1.1 and the operations' is marked with
!, and so are one against rows above 0.5 (a row costs the same however many there are, but for caches that no
longer hold them) and one of memory above 1.1. A DLRM's operations grow faster than its tables: F of them
have F (F + 1) / 2 products, which are the top MLP's input, and so tables are counted with cross layers.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

STEPS = 40
DENSE = 13
LINEAR, FLAT = 1.1, 0.5
"""Growth above which a point is marked."""
NOISE = 128 << 20
"""Memory below which growth says nothing."""


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


ON_DISK = ("tiers.store=ssd", "tiers.policy=lru", "tiers.resident_bytes=64MiB")
CROSSES = ("model=dlrm_dcn", "model.cross_layers=2", "model.cross_rank=16", "model.top=[64]")
AXES = {
    "batch": Axis("batch size", (128, 512, 2048, 8192, 32_768, 65_536), "batch"),
    "rows": Axis("rows of each table", (10_000, 40_000, 160_000, 640_000, 2_560_000), "rows"),
    "tables": Axis("tables", (8, 26, 100, 400, 800), "tables", Point(rows=10_000, dim=16), CROSSES),
    "dim": Axis("embedding dimension", (8, 16, 32, 64, 128), "dim"),
    "pooling": Axis("pooling factor (ids of a bag, on average)", (1, 2, 4, 8, 16, 32), "pooling"),
    "cold": Axis(
        "rows of the table on a disk", (10**6, 10**7, 10**8, 10**9), "rows", Point(tables=1, dim=4), ON_DISK
    ),
    "ranks": Axis("ranks", (1, 2, 4, 8), "ranks", words=("tiers.sharded=true",)),
}
BASE = Point(batch=64, rows=100)


@dataclass
class Result:
    """Of one axis: its points, and each one's figures."""

    axis: str
    values: list[int]
    microseconds: list[float]
    """Of a step against batch size, else of a sample."""
    memory: list[float]
    """Bytes over the base's."""
    operations: list[float]
    """Of the model's matrix products, of a step or a sample as in ``microseconds``."""

    @property
    def limit(self) -> float:
        """Growth of time that is too much."""
        return FLAT if self.axis in ("rows", "cold", "ranks") else LINEAR


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
    directory.mkdir()
    pq.write_table(pa.table(arrays), directory / "samples.parquet")


def run(point: Point, work: Path, overrides: Sequence[str]) -> dict[str, Any]:
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
        f"hydra.run.dir={work / 'run'}", *overrides,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    report: dict[str, Any] = json.loads((work / "run" / "report.json").read_text())
    return report


def sweep(axis: str, base: int, work: Path, repetitions: int, overrides: Sequence[str]) -> Result:
    """All points of ``axis``; ``base`` is the memory that is not theirs."""
    changed = AXES[axis]
    points = [replace(changed.others, **{changed.size: value}) for value in changed.values]
    overrides = [*changed.words, *overrides]
    times: list[list[float]] = [[] for _ in points]
    peaks: list[list[float]] = [[] for _ in points]
    per = [1 if axis == "batch" else point.batch for point in points]
    run(points[0], work, overrides)  # not counted
    for _ in range(repetitions):
        for index, point in enumerate(points):
            report = run(point, work, overrides)
            times[index].append(report["throughput"]["step_ms"]["p50"] * 1e3 / per[index])
            peaks[index].append(report["memory"]["peak_rss_bytes"] - base)
    return Result(
        axis,
        list(changed.values),
        list(map(statistics.median, times)),
        list(map(statistics.median, peaks)),
        [operations(point, overrides) / n for point, n in zip(points, per, strict=True)],
    )


def growth(values: Sequence[int], figures: Sequence[float], least: float = 0.0) -> list[float | None]:
    """Slopes in logarithms, each to the point before; None for the first and below ``least``."""
    slopes: list[float | None] = [None]
    for i in range(1, len(values)):
        known = min(figures[i - 1 : i + 1]) > least
        ratio = figures[i] / figures[i - 1] if known else math.nan
        slopes.append(math.log(ratio) / math.log(values[i] / values[i - 1]) if known else None)
    return slopes


def heads(result: Result) -> list[str]:
    """Of the table."""
    return [
        result.axis,
        "us/step" if result.axis == "batch" else "us/sample",
        "growth",
        "operations",
        "memory MiB",
        "growth",
    ]


def rows(result: Result) -> list[list[str]]:
    """A table of one axis, as text."""

    def slope(value: float | None, limit: float) -> str:
        return "-" if value is None else f"{value:.2f}{' !' if value > limit else ''}"

    time = growth(result.values, result.microseconds)
    own = growth(result.values, result.operations)
    memory = growth(result.values, result.memory, NOISE)
    return [
        [
            f"{value:,}",
            f"{result.microseconds[i]:,.2f}",
            slope(time[i], max(result.limit, own[i] or 0.0)),
            slope(own[i], math.inf),
            f"{result.memory[i] / 2**20:,.0f}",
            slope(memory[i], LINEAR),
        ]
        for i, value in enumerate(result.values)
    ]


def write_html(path: Path, results: Sequence[Result], environment: dict[str, Any]) -> None:
    """The tables and a plot of each, in one file."""
    from recpipe.report import html, page, plots

    sections = []
    for result in results:
        label, unit = AXES[result.axis].name, "us a step" if result.axis == "batch" else "us a sample"
        mib = [value / 2**20 for value in result.memory]
        drawn = [
            plots.curves(title, {"": (result.values, values)}, plots.Axis(label), axis)
            for title, values, axis in (
                ("Time", result.microseconds, plots.Axis(unit, from_zero=True)),
                ("Memory", mib, plots.Axis("MiB", from_zero=True)),
            )
        ]
        note = (
            f"! is growth of time above {result.limit} and above that of the model's operations, or growth "
            f"of memory above {LINEAR}; 1 is linear."
        )
        table = page.Table([*map(page.Head, heads(result))], rows(result))
        sections.append(page.Section(f"Against {label}", [drawn, table, page.Line(note, "soft")]))
    sections.append(page.environment(environment))
    title = "Growth of time and memory"
    lead = f"Others at {', '.join(f'{value:,} {name}' for name, value in asdict(Point()).items())}."
    html.write(page.Page(title, title, lead, sections), path)


def main() -> None:
    """Sweep the axes, print their tables and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--axis", action="append", choices=tuple(AXES), help="one of them; may be repeated")
    parser.add_argument("--html", type=Path, default=Path("growth.html"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        run(BASE, work, arguments.overrides)  # the first one may measure what is fast on this machine
        first = run(BASE, work, arguments.overrides)
        for axis in arguments.axis or AXES:
            base = first["memory"]["peak_rss_bytes"]
            result = sweep(axis, base, work, arguments.repetitions, arguments.overrides)
            results.append(result)
            for line in [heads(result), *rows(result)]:
                print("".join(f"{cell:>14}" for cell in line), flush=True)
            print()
    write_html(arguments.html, results, first["environment"])
    print(f"plots: {arguments.html}")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1))


if __name__ == "__main__":
    main()
