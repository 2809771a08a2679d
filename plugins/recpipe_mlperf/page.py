"""The results of ``task=time_to_quality``: a table on the terminal, and time_to_quality.html; from the
content of time_to_quality.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from recpipe.common.console import show
from recpipe.report import figures, html, plots, terminal
from recpipe.report.page import Cell, Head, Line, Page, Plot, Section, Table, environment
from recpipe.report.plots import Axis, Values
from recpipe_mlperf.score import LEAST, OFFICIAL

NAME = 17
"""Characters of a recipe's name in a terminal of 80."""


def show_result(told: Mapping[str, Any], page: Path | None) -> None:
    """Print the table, what is to be known of it, and where the page is."""

    def draw(out: Console) -> None:
        for table in (_samples(told), _times(told)):
            out.print(terminal.drawn(table, "close"))
        terminal.print_lines(out, sentences(told), folds=True)

    show(draw)
    if page is not None:
        terminal.print_place(page)


def _samples(told: Mapping[str, Any]) -> Table:
    """A line for each recipe: samples to the target, which no clock disturbs."""
    heads = [Head("recipe", number=False), Head("reached it"), Head("samples to target")]
    heads += [Head("fewest..most"), Head("ratio"), Head("95% interval", narrow="95%\ninterval")]
    rows: list[list[Cell | str]] = [
        [
            _name(row),
            f"{row['converged']} of {len(row['runs'])}",
            figures.short(row["samples"]["olympic_mean"]),
            _ends(row["samples"], figures.short),
            figures.decimal(row["samples_ratio"], 3),
            figures.interval(row["samples_ratio_interval"], 2),
        ]
        for row in told["rows"]
    ]
    return Table(heads, rows)


def _times(told: Mapping[str, Any]) -> Table:
    """A line for each recipe: time to the target, what comes before it, and speed."""
    heads = [Head("recipe", number=False), Head("time to target", narrow="time to\ntarget")]
    heads += [Head("shortest..longest", narrow="shortest..\nlongest"), Head("ratio")]
    heads += [Head("before it", narrow="before\nit"), Head("CPU time", narrow="CPU\ntime"), Head("samples/s")]
    rows: list[list[Cell | str]] = [
        [
            _name(row),
            _seconds(row["seconds"]["olympic_mean"]),
            _ends(row["seconds"], _seconds),
            figures.decimal(row["seconds_ratio"], 3),
            _seconds(row["set_up_seconds"]),
            _seconds(row["cpu_seconds"]),
            figures.count(row["samples_per_second"]),
        ]
        for row in told["rows"]
    ]
    return Table(heads, rows)


def _name(row: Mapping[str, Any]) -> Cell:
    return Cell(
        figures.shortened(row["name"], NAME) + "*" * bool(row["altered"]), bad=row["failed"] is not None
    )


def _ends(spread: Mapping[str, float | None], form: Any) -> str:
    return "" if spread["min"] is None else f"{form(spread['min'])}..{form(spread['max'])}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    scale, unit = figures.time_unit(value)
    return f"{value / scale:.3g} {unit}"


def sentences(told: Mapping[str, Any]) -> list[str]:
    """What the figures are of, and what they are worth."""
    way = "at least" if told["better"] == "higher" else "at most"
    runs, rows = len(told["seeds"]), told["rows"]
    found = [
        f"Target: {figures.title(told['metric'])} of {way} {told['target']:g} on {told['eval_samples']:,} "
        f"held-out samples, evaluated after every {told['every_samples']:,.0f} of "
        f"{told['train_samples']:,} training samples.",
        f"{runs} run{'s' * (runs > 1)} of each recipe, a seed each. Time (and CPU time of the process's "
        "threads): from before the first batch is read to the end of the evaluation that reached the target, "
        "evaluations included; before it: imports, data, what plugins prepare, tables. Means leave out the "
        "fastest and the slowest run, of which one may not have reached the target; the fastest and slowest "
        "are those that did. Interval: of the median ratio of samples of runs with the same seed to "
        f"{rows[0]['name']}'s.",
    ]
    if runs < OFFICIAL:
        what = "there is no mean" if runs < LEAST else "means are not what its rules ask for"
        found.append(f"MLPerf asks for {OFFICIAL} runs; with {runs} {what}.")
    for row in rows:
        if row["failed"]:
            found.append(f"! {row['name']}: {row['failed']}; left out from then on.")
        elif missed := len(row["runs"]) - row["converged"]:
            valid = row["samples"]["olympic_mean"] is not None
            found.append(
                f"! {row['name']}: {missed} of {len(row['runs'])} runs did not reach the target (best "
                f"{figures.decimal(row['best'], 5)})" + ("." if valid else ": no result.")
            )
        if row["altered"]:
            found.append(f"* {row['name']}: alters {', '.join(row['altered'])}.")
    return [*found, *told["notes"]]


def write(told: Mapping[str, Any], path: Path) -> Path:
    """Write the page to ``path`` and return it."""
    lead = f"To {figures.title(told['metric'])} {told['target']:g}, {len(told['seeds'])} runs each."
    sections = [
        Section("", [_samples(told), _times(told), *(Line(each, "soft") for each in sentences(told))]),
        Section("Every run", [_runs(told)]),
        Section("Quality by samples", [[_curves(told)]]),
        environment(told["environment"]),
    ]
    heading = "recpipe: time to quality"
    return html.write(Page(heading, heading, lead, sections), path)


def _runs(told: Mapping[str, Any]) -> Table:
    heads = [Head("recipe", number=False), Head("seed"), Head("status", number=False)]
    heads += [Head(name) for name in ("samples", "last value", "time", "evaluations", "CPU time")]
    rows = [
        [
            Cell(row["name"], link=run["run"]),
            str(run["seed"]),
            run["status"],
            figures.count(run["samples"]),
            figures.decimal(run["value"], 5),
            _seconds(run["seconds"]),
            _seconds(run["evaluation_seconds"]),
            _seconds(run["cpu_seconds"]),
        ]
        for row in told["rows"]
        for run in row["runs"]
    ]
    return Table(heads, rows)


def _curves(told: Mapping[str, Any]) -> Plot:
    """The first run of each recipe, and the target."""
    series: dict[str, tuple[Values, Values]] = {}
    last = 0
    for row in told["rows"]:
        points: Sequence[Mapping[str, Any]] = row["runs"][0]["evaluations"] if row["runs"] else ()
        if points:
            series[row["name"]] = [p["samples"] for p in points], [p["value"] for p in points]
            last = max(last, points[-1]["samples"])
    series["target"] = [0, last], [told["target"]] * 2
    title = figures.title(told["metric"])
    return plots.curves(f"{title} of the first seed", series, Axis("samples", "count"), Axis(title))
