"""The table of an evaluation, for an 80-column terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from recpipe.answers.figures import CALIBRATION
from recpipe.common.console import show
from recpipe.report import figures
from recpipe.report.quality import LABELS

NAMES = {**LABELS, CALIBRATION: "calibration"}


def print_evaluation(content: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the content of evaluation.json."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(content):
        table.add_row(name, Text(value))

    def draw(out: Console) -> None:
        out.print(table)
        if content["by"]:
            for task in content["tasks"]:
                out.print(_sliced(content["by"], task, len(content["tasks"]) > 1))

    show(draw, console)


def _rows(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    data = content["data"]
    where = f" of {data['path']}" if data["path"] else ""
    part = ", the held-out part" if data["split"] == "eval" else ""
    rejected = f", {figures.count(data['rejected_rows'])} bad rows left out" if data["rejected_rows"] else ""
    yield "data", f"{data['name']}: {figures.count(data['samples'])} rows{where}{part}{rejected}"
    yield "checkpoint", f"{content['checkpoint']}, step {figures.count(content['step'])}"
    several = len(content["tasks"]) > 1
    for name, task in content["tasks"].items():
        title = f"{name} " if several else ""
        if task["positives"] is not None:
            yield f"{title}positives", _positives(task)
        for figure, found in task["figures"].items():
            yield f"{title}{NAMES[figure]}", _interval(found)
    yield "speed", f"{figures.count(content['samples_per_second'])} rows/s"


def _positives(task: Mapping[str, Any]) -> str:
    share = task["positives"] / max(1, task["samples"])
    return f"{figures.count(task['positives'])} ({share:.2%})"


def _interval(found: Mapping[str, float | None]) -> str:
    text = figures.decimal(found["value"], 5)
    return text if found["low"] is None else f"{text}   95%: {found['low']:.5f} to {found['high']:.5f}"


def _sliced(by: Mapping[str, Any], task: str, several: bool) -> Table:
    """One line for each slice: rows, positives and figures, each with half the width of its interval."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(f"{by['column']}{f' ({task})' if several else ''}", overflow="fold")
    first = by["slices"][0]["tasks"][task]
    names = [name for name in first["figures"] if name != "logloss"]
    for name in ("rows", *(["positives"] if first["positives"] is not None else [])):
        table.add_column(name, justify="right", no_wrap=True)
    for name in names:
        table.add_column(NAMES[name], justify="right", no_wrap=True)
    for part in by["slices"]:
        own = part["tasks"][task]
        counts = [figures.short(own["samples"])]
        counts += [] if first["positives"] is None else [figures.short(own["positives"])]
        cells = [_short(own["figures"].get(name)) for name in names]
        table.add_row(Text(part["value"]), *counts, *cells)
    return table


def _short(found: Mapping[str, float | None] | None) -> str:
    if found is None:
        return "-"
    text = figures.decimal(found["value"])
    if found["low"] is None or found["high"] is None:
        return text
    return f"{text}±{(found['high'] - found['low']) / 2:.3f}"
