"""The report of a sweep: a table of its jobs on the terminal, sweep.json (schema 1) and sweep.html.

It is made only from the jobs' report.json, so it can be made again later, and for any launcher.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml
from rich.console import Console

from recpipe.common.console import Output
from recpipe.common.files import JOB_FILE
from recpipe.errors import UserError
from recpipe.report import figures, html, plots, terminal
from recpipe.report.figures import quality_names, shown_figures
from recpipe.report.files import ReportFiles
from recpipe.report.page import Cell, Head, Line, Page, Section, Table
from recpipe.report.record import SCHEMA
from recpipe.report.run_plots import quality_bars

REPORT, OVERRIDES = "report.json", Path(".hydra") / "overrides.yaml"


@dataclass
class Job:
    """One job of a sweep; figures are None unless it is done."""

    job: str
    """Its folder, relative to the sweep's."""
    overrides: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)
    """The ``overrides`` that not all jobs share."""
    state: str = "no report"
    """``done``, ``failed``, ``stopped`` (by a signal to the sweep), ``damaged`` (its report cannot be read)
    or ``no report`` (not ended, or no training)."""
    exit_status: int | None = None
    """None: not known, or not ended."""
    fault: str | None = None
    samples_per_second: float | None = None
    step_ms_p50: float | None = None
    quality: dict[str, float | None] = field(default_factory=dict)
    """The figures of quality, by their names in report.json."""
    bytes_between_ranks: int | None = None
    """Bytes sent and received by rank 0; None for a run of one process."""
    peak_rss_bytes: int | None = None
    altered: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """All in one, the figures of quality by their names."""
        told = asdict(self)
        quality: dict[str, float | None] = told.pop("quality")
        return told | quality


@dataclass(frozen=True)
class Column:
    """One figure of every job."""

    head: Head
    cell: Callable[[Job], str]


SPEED = (
    Column(Head("samples/s", narrow="samples\n/s"), lambda job: figures.count(job.samples_per_second)),
    Column(Head("step p50 (ms)", narrow="p50\nms"), lambda job: figures.decimal(job.step_ms_p50, 2)),
)
COSTS = (
    Column(
        Head("bytes between ranks", narrow="between\nranks"),
        lambda job: figures.size(job.bytes_between_ranks),
    ),
    Column(Head("peak RSS", narrow="peak\nRSS"), lambda job: figures.size(job.peak_rss_bytes)),
)
LEAST = 16
"""Characters that overrides have at least; rather than be cut, the columns beside them go on in another
table."""
NARROW = {"logloss": "log-\nloss", "poisson_deviance": "Poisson\ndeviance"}
MOST = 4
"""How many figures of quality fit into eighty columns beside the others."""


def report_command(words: Sequence[str]) -> int:
    """``recpipe sweep-report DIR``: the folder of a sweep, multirun/DATE/TIME."""
    report(Path(words[0]))
    return 0


def report(directory: Path, console: Console | None = None) -> list[Job]:
    """Print the table of the sweep in ``directory`` and write sweep.json and sweep.html there.

    Raises UserError if ``directory`` has no jobs or, after printing, if it cannot be written. A job without a
    complete report is also a line of the table.
    """
    jobs = read(directory)
    every = _common(jobs)
    content = {"schema": SCHEMA, "every_job": every, "jobs": [job.to_dict() for job in jobs]}
    files = ReportFiles(directory, f"mend that and say recpipe sweep-report {directory}")
    files.write_json("sweep.json", content)
    out = console or Output()
    _print(every, jobs, out)
    page = directory / "sweep.html"
    if files.write(page.name, lambda path: html.write(_page(every, jobs), path)):
        terminal.print_place(page, out)
    files.check()
    return jobs


def read(directory: Path) -> list[Job]:
    """The jobs of the sweep in ``directory``, in the order of their numbers."""

    def is_job(folder: Path) -> bool:
        return any((folder / name).exists() for name in (REPORT, JOB_FILE, OVERRIDES))

    if not directory.is_dir():
        raise UserError(f"no folder {directory}: name that of a sweep, multirun/DATE/TIME")
    if is_job(directory):
        raise UserError(
            f"{directory} is one run's folder: name that of a sweep, which holds its jobs' folders"
        )
    folders = []
    # At any depth (hydra.sweep.subdir may have slashes), but not inside a job's.
    for place, inner, _ in os.walk(directory):
        found = [name for name in inner if is_job(Path(place) / name)]
        folders += [(Path(place) / name).relative_to(directory) for name in found]
        inner[:] = [name for name in inner if name not in found]
    if not folders:
        raise UserError(f"no job's folder in {directory}: name that of a sweep, multirun/DATE/TIME")
    folders.sort(key=lambda folder: (int(folder.name) if folder.name.isdecimal() else 0, str(folder)))
    jobs = [_job(directory, folder) for folder in folders]
    every = _common(jobs)
    for job in jobs:
        job.differs = [word for word in job.overrides if word not in every]
    return jobs


def _common(jobs: Sequence[Job]) -> list[str]:
    """The overrides that all jobs with known overrides share; empty if there is only one job."""
    known = [job.overrides for job in jobs if job.overrides]
    return [word for word in known[0] if all(word in words for words in known)] if len(known) > 1 else []


def _job(directory: Path, folder: Path) -> Job:
    """What a job's folder says of it; a file that is damaged says nothing."""
    job = Job(str(folder))
    known, overrides = {}, None
    with suppress(OSError, ValueError):
        known = json.loads((directory / folder / JOB_FILE).read_bytes())
    with suppress(OSError, ValueError, yaml.YAMLError):
        overrides = yaml.safe_load((directory / folder / OVERRIDES).read_bytes())
    known = known if isinstance(known, dict) else {}
    status = known.get("exit_status")
    job.exit_status = status if isinstance(status, int) else None
    job.overrides = _words(overrides) or _words(known.get("overrides"))
    path = directory / folder / REPORT
    if known.get("stopped"):
        job.state = "stopped"
    elif job.exit_status:
        # A report that exists nevertheless is from an earlier run.
        job.state, job.fault = "failed", str(known.get("fault") or f"exit status {job.exit_status}")
    elif path.exists():
        try:
            content = json.loads(path.read_bytes())
            if not isinstance(content, dict) or content.get("schema") != SCHEMA:
                raise ValueError(f"no report of schema {SCHEMA}")
            read = {
                "samples_per_second": _number(content, "throughput", "samples_per_second"),
                "step_ms_p50": _number(content, "throughput", "step_ms", "p50"),
                "peak_rss_bytes": _number(content, "memory", "peak_rss_bytes"),
            }
            if (_number(content, "ranks", "world") or 1) > 1:
                sent, received = (_number(content, "ranks", f"bytes_{way}") for way in ("sent", "received"))
                read["bytes_between_ranks"] = (sent or 0) + (received or 0)
            names = quality_names([content["quality"]])
            job.quality = {name: _number(content, "quality", name) for name in names}
            for name, value in read.items():
                setattr(job, name, value)
            job.altered = _words(content.get("altered"))
            job.state = "done"
        except (OSError, ValueError) as fault:
            job.state, job.fault = "damaged", f"cannot read {path}: {fault}"
    return job


def _words(value: object) -> list[str]:
    return [str(word) for word in value] if isinstance(value, list) else []


def _number(content: Mapping[str, Any], *keys: str) -> float | None:
    value: Any = content
    for key in keys:
        if not isinstance(value, dict) or key not in value:
            raise ValueError(f"no {'.'.join(keys)} in it")
        value = value[key]
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    raise ValueError(f"{'.'.join(keys)} is no number")


def _quality(jobs: Sequence[Job]) -> list[Column]:
    """The columns of the figures that fit the jobs' predictions."""
    return [
        Column(
            Head(figures.title(name), narrow=NARROW.get(name, "")),
            lambda job, name=name: figures.decimal(job.quality.get(name)),  # type: ignore[misc]
        )
        for name in shown_figures(job.quality for job in jobs)
    ]


def _print(every: Sequence[str], jobs: Sequence[Job], console: Console) -> None:
    quality = _quality(jobs)
    several = len(quality) > MOST
    tables = [[*SPEED, *COSTS], quality] if several else [[*SPEED, *quality, *COSTS]]
    room = console.width - terminal.width([f"{job.job}*" for job in jobs] + ["job"]) - LEAST - 2
    room -= terminal.width([job.state for job in jobs])
    for columns in tables:
        shown: list[Column] = []
        left = room
        for column in columns:
            head = column.head.narrow or column.head.title
            takes = terminal.width([head, *map(column.cell, jobs)]) + 1
            if shown and takes > left:
                console.print(terminal.drawn(_table(jobs, shown), "tight"))
                shown, left = [], room
            shown.append(column)
            left -= takes
        console.print(terminal.drawn(_table(jobs, shown), "tight"))
    lines = [f"every job: {' '.join(every)}"] if every else []
    lines += [f"* job {job.job} alters {', '.join(job.altered)}" for job in jobs if job.altered]
    lines += [f"job {job.job} {job.state}: {job.fault}" for job in jobs if job.fault]
    terminal.print_lines(console, lines)


def _table(jobs: Sequence[Job], columns: Sequence[Column], page: bool = False) -> Table:
    heads = [
        Head("job", number=False),
        Head("overrides that differ" if page else "overrides", number=False),
        *(column.head for column in columns),
        Head("state", number=False, whole=True),
    ]
    rows: list[list[Cell | str]] = []
    for job in jobs:
        link = f"{quote(job.job)}/report.html" if job.state == "done" else None
        name = Cell(f"{job.job}{'*' if job.altered else ''}", link=link)
        cells = [column.cell(job) for column in columns]
        state = Cell(job.state, bad=job.state != "done")
        rows.append([name, (" " if page else "\n").join(job.differs), *cells, state])
    return Table(heads, rows)


def _page(every: Sequence[str], jobs: Sequence[Job]) -> Page:
    done = [job for job in jobs if job.state == "done"]
    note = (
        "Bytes between ranks are what rank 0 sent and received; speed counts the samples of all trainers; "
        "peak RSS is rank 0's."
    )
    warnings = [
        f"* job {job.job} alters {', '.join(job.altered)}: its figures need not equal those of a run without "
        "plugins."
        for job in jobs
        if job.altered
    ]
    warnings += [f"job {job.job} {job.state}: {job.fault}" for job in jobs if job.fault]
    table = _table(jobs, [*SPEED, *_quality(jobs), *COSTS], page=True)
    sections = [Section("", [table, Line(note, "soft"), *(Line(warning, "warn") for warning in warnings)])]
    if done:
        labels = [f"{job.job}{'*' * bool(job.altered)} {' '.join(job.differs)}".strip() for job in done]
        names = [label if len(label) <= 40 else f"{label[:38]}..." for label in labels]
        drawn = [
            plots.bars("Speed", names, [job.samples_per_second for job in done], "samples/s"),
            plots.bars("Step time, median", names, [job.step_ms_p50 for job in done], "ms"),
            *quality_bars(names, [job.quality for job in done]),
        ]
        if any(job.bytes_between_ranks for job in done):
            mib = [(job.bytes_between_ranks or 0) / 2**20 for job in done]
            drawn.append(plots.bars("Bytes between ranks", names, mib, "MiB sent and received by rank 0"))
        sections.append(Section("Plots", [drawn]))
    return Page(
        "recpipe sweep",
        f"recpipe: sweep of {len(jobs)} job{'s' if len(jobs) > 1 else ''}",
        f"{len(done)} done{' · every job: ' + ' '.join(every) if every else ''}",
        sections,
    )
