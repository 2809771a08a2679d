"""The results of task=compare: compare.json (schema 1), two tables on the terminal, and compare.html."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from recpipe.report import compared_plots, figures, html, plots
from recpipe.report.plots import Axis
from recpipe.report.quality import LABELS, shown_figures
from recpipe.report.record import as_json, replace_file, write_json
from recpipe.report.remarks import faults, how_far, labelled, notes
from recpipe.report.row_labels import Label


def write_result(content: Mapping[str, Any], path: Path) -> Path:
    """Write ``path``, compare.json, atomically."""
    return write_json(path, as_json(content))


def print_result(content: Mapping[str, Any], console: Console) -> None:
    """The comparison as two tables of 80 columns: speed, memory and traffic, then quality and parameters."""
    if content["partial"]:
        console.print("stopped early: what is finished so far", markup=False)
    for table in (_speed_table(content["rows"]), _quality_table(content["rows"])):
        console.print(table)
        console.print()
    for note in notes(content):
        console.print(note, markup=False, highlight=False)


def so_far(content: Mapping[str, Any]) -> list[RenderableType]:
    """The tables of the rounds that are finished, while others run, and what is wrong in them."""
    rows = content["rows"]
    return [
        f"so far: {how_far(content)}",
        _speed_table(rows),
        "",
        _quality_table(rows),
        *(f"! {fault}" for fault in faults(content)),
        "",
    ]


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for index, name in enumerate(columns):
        # Names may be folded into several lines, but not numbers, which would be misread.
        table.add_column(name, justify="right" if index else "left", overflow="fold", no_wrap=index > 0)
    return table


def _name(label: Label) -> str:
    """The first cell of a row: each setting in a line of its own."""
    first, *settings = label.lines
    return "\n".join([first, *(f" {setting}" for setting in settings)])


def _speed_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Speed and ratio over all steps, the ratios of the two other speeds, memory and traffic."""
    table = _table(
        "recipe", "samples/s", "ratio", "95%\ninterval", "steady", "start\nto end", "memory", "cold\nbytes"
    )
    for row, label in zip(rows, labelled(rows), strict=True):
        table.add_row(
            _name(label),
            figures.count(row["samples_per_second"]["median"]),
            figures.decimal(row["ratio"], 3),
            figures.interval(row["ratio_interval"], 2),
            figures.decimal(row["steady"]["ratio"], 3),
            figures.decimal(row["end_to_end"]["ratio"], 3),
            figures.size(row["memory_bytes"]),
            figures.size(_moved(row["io"], "bytes")),
        )
    return table


def _quality_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    names = shown_figures(rows)
    columns = (column for name in names for column in (LABELS[name], "diff"))
    table = _table("recipe", *columns, "param\ndiff")
    for row, label in zip(rows, labelled(rows), strict=True):
        cells = []
        for key in names:
            cells += [figures.decimal(row[key]), figures.signed(row[f"{key}_difference"])]
        table.add_row(_name(label), *cells, figures.scientific(row["max_parameter_difference"]))
    return table


def _moved(io: Mapping[str, Any], unit: str) -> float | None:
    """Rows or bytes read plus those written."""
    return io[f"{unit}_read"] + io[f"{unit}_written"] if io else None


def write_html(content: Mapping[str, Any], path: Path) -> Path:
    """Write ``path``, compare.html, which needs no other file."""
    rows = content["rows"]
    template = html.page("compare.html.j2")
    links = [_link(row, path.parent) for row in rows]
    text = template.render(
        content=content,
        rows=rows,
        notes=notes(content),
        labels=labelled(rows),
        plots=_plots(rows),
        curves=compared_plots.curves(rows),
        links=links,
        moved=_moved,
        quality=[(name, LABELS[name]) for name in shown_figures(rows)],
    )
    return replace_file(path, text)


def _link(row: Mapping[str, Any], directory: Path) -> str | None:
    """The row's own report, relative to ``directory``; None if there is none."""
    place = f"{row['run']}/report.html"
    return quote(place) if row["run"] and (directory / place).is_file() else None


def _memory(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    keys = {"resident rows": "resident_bytes", "row maps, policy, slab, buffers": "tier_overhead_bytes"}
    return {name: [row["memory"].get(key, 0) for row in rows] for name, key in keys.items()}


def _plots(rows: Sequence[Mapping[str, Any]]) -> list[plots.Plot]:
    labelled_rows = zip(labelled(rows), compared_plots.legend(rows), rows, strict=True)
    found = [
        (label.wrapped(plots.NAME_WIDTH), key, row) for label, key, row in labelled_rows if row["rounds"]
    ]
    if not found:
        return []
    names, keys, done = zip(*found, strict=True)
    speeds = [row["samples_per_second"] for row in done]
    spread = [(speed["min"], speed["max"]) for speed in speeds]
    drawn = [
        plots.bars(
            "Speed: median, lowest and highest", names, [s["median"] for s in speeds], "samples/s", spread
        ),
        *_speed_by_round(keys, done),
        plots.bars(
            "Cold rows moved", names, [_moved(row["io"], "rows") for row in done], "rows read and written"
        ),
        plots.bars(
            "Cold bytes moved",
            names,
            [_moved(row["io"], "bytes") for row in done],
            "read and written",
            unit="bytes",
        ),
        plots.stacked("Memory", names, _memory(done), "resident rows, and all beside them", "bytes"),
    ]
    return drawn + html.quality_bars(names, done)


def _speed_by_round(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[plots.Plot]:
    """A curve for each row, if there is more than one round."""
    curves = {
        name: (range(1, len(row["rounds"]) + 1), row["rounds"]) for name, row in zip(names, rows, strict=True)
    }
    if all(len(rounds) < 2 for rounds, _ in curves.values()):
        return []
    across, up = Axis("round", "count"), Axis("samples/s", from_zero=True)
    return [plots.curves("Speed by round", curves, across, up)]
