"""What was measured, as a table on the terminal and a page with plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recpipe.report import html, plots
from recpipe.report.files import ReportFiles
from recpipe.report.page import Cell, Head, Line, Page, Part, Plot, Section, Table, environment
from recpipe.report.terminal import show_table
from recpipe_deeprecsys.search import STATIC

SHOWN = ("50", "95", "99")
"""Percentiles in tables and plots."""
BASELINE = f"parts of {STATIC} candidates, as DeepRecSys's baseline has them"


def runs_table(runs: Sequence[Mapping[str, Any]], percentile: str) -> Table:
    """A line for each of LoadGen's runs."""
    told = sorted({*SHOWN, percentile}, key=float)
    heads = [
        Head("scenario", number=False, whole=True),
        Head("requests/s", narrow="asked/s"),
        Head("completed/s", narrow="done/s"),
        *(Head(f"p{name}, ms") for name in told),
        Head("LoadGen", number=False, whole=True),
    ]
    return Table(heads, [_row(run, told) for run in runs])


def _row(run: Mapping[str, Any], told: Sequence[str]) -> list[Cell | str]:
    rate = "" if run["rate"] is None else f"{run['rate']:,.1f}"
    latency = [f"{run['latency_ms'][name]:.2f}" for name in told]
    verdict = Cell("VALID" if run["valid"] else "INVALID", bold=run["valid"], hint="; ".join(run["why"]))
    return [run["scenario"], rate, f"{run['completed']:,.1f}", *latency, verdict]


def load_plot(runs: Sequence[Mapping[str, Any]], bound_ms: float) -> list[Plot]:
    """Percentiles of the latency against the rate of requests; [] with fewer than two rates."""
    served = sorted((run for run in runs if run["rate"] is not None), key=lambda run: run["rate"])
    if len(served) < 2:
        return []
    rates = [run["rate"] for run in served]
    curves: dict[str, tuple[list[float], list[float]]] = {
        f"p{name}": (rates, [run["latency_ms"][name] for run in served]) for name in SHOWN
    }
    curves["bound"] = ([rates[0], rates[-1]], [bound_ms] * 2)
    x, y = plots.Axis("requests/s"), plots.Axis("latency, ms", log=True)
    return [plots.curves("latency by load", curves, x, y)]


def percentile_of(report: Mapping[str, Any]) -> str:
    """The percentile that is bounded, as latencies are named by it."""
    return f"{report['options']['percentile']:g}"


def write(report: Mapping[str, Any], directory: Path) -> None:
    """bench.json and bench.html in ``directory``, and the table on the terminal."""
    files = ReportFiles(directory)
    files.write_json("bench.json", report)
    page = page_of(report)
    files.write("bench.html", lambda path: html.write(page, path))
    show_table(runs_table(report["runs"], percentile_of(report)), [])
    files.check()


def page_of(report: Mapping[str, Any]) -> Page:
    """The page of a report."""
    options = report["options"]
    parts: list[Part] = [
        load_plot(report["runs"], options["bound_ms"]),
        runs_table(report["runs"], percentile_of(report)),
    ]
    if report["why"]:
        parts.insert(0, Line(report["why"], "warn"))
    tiles = []
    if report["best"] is not None:
        best = report["best"]
        tiles = [
            (f"{best['rate']:,.0f}", "requests/s within the bound"),
            (f"{report['candidates_per_second']:,.0f}", "candidates/s within the bound"),
            (f"{best['latency_ms'][percentile_of(report)]:.1f} ms", f"p{percentile_of(report)} at that rate"),
        ]
    said = [(name, ", ".join(map(str, v)) if isinstance(v, list) else str(v)) for name, v in options.items()]
    sections = [
        Section("Load", parts),
        *search_section(report),
        *models_section(report),
        Section("Options", [Table((), said)]),
        environment(report["environment"]),
    ]
    lead = f"{report['package']}: {options['bound_ms']:g} ms at p{percentile_of(report)}"
    return Page("Latency-bounded throughput", "Latency-bounded throughput", lead, sections, tiles=tiles)


def search_section(report: Mapping[str, Any]) -> list[Section]:
    """What was tried in the search; [] without one."""
    tried = report["search"]
    if not tried:
        return []
    rows: list[list[Cell | str]] = []
    series: dict[str, list[tuple[float, float]]] = {}
    for one in tried:
        own = one["batching"]
        rate = f"not above {one['floor']:,.1f}" if one["rate"] is None else f"{one['rate']:,.1f}"
        chosen = own == report["batching"]
        rows.append([str(own["batch"]), f"{own['wait_ms']:g}", str(own["workers"]), Cell(rate, bold=chosen)])
        if one["rate"] is not None:
            name = f"{own['workers']} workers, {own['wait_ms']:g} ms"
            series.setdefault(name, []).append((own["batch"], one["rate"]))
    curves = {n: ([x for x, _ in sorted(p)], [y for _, y in sorted(p)]) for n, p in series.items()}
    x, y = plots.Axis("batch", "count", log=True), plots.Axis("requests/s within the bound", from_zero=True)
    drawn = [plots.curves("batchings that were better than those before", curves, x, y)] if curves else []
    heads = [Head("batch"), Head("wait, ms"), Head("workers"), Head("requests/s within the bound")]
    parts: list[Part] = [drawn, Table(heads, rows)]
    for key, what in (("gain", "every request cut over the processes"), ("static_gain", BASELINE)):
        if report[key] is not None:
            parts.insert(0, f"{report[key]:.2f} times the rate of {what}.")
    return [Section("Search", parts)]


def models_section(report: Mapping[str, Any]) -> list[Section]:
    """The latency of each of several models at the largest valid rate; [] for one alone."""
    if not report["models"]:
        return []
    heads = [Head("model"), Head("requests"), *(Head(f"p{name}, ms") for name in SHOWN)]
    rows = [
        [str(n), f"{own['queries']:,}", *(f"{own['latency_ms'][name]:.2f}" for name in SHOWN)]
        for n, own in enumerate(report["models"], 1)
    ]
    return [Section("Models beside each other, at the largest valid rate", [Table(heads, rows)])]
