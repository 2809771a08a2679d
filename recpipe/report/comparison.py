"""The results of task=compare: compare.json (schema 1), two tables on the terminal, and compare.html."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rich.console import Console, RenderableType

from recpipe.report import figures, html, plots, terminal
from recpipe.report.figures import BY_LABEL, FIRST, quality_names, shown_figures, title
from recpipe.report.page import Cell, Folded, Head, Line, Page, Plot, Section, Table, environment, pairs
from recpipe.report.plots import Axis, Values
from recpipe.report.remarks import faults, how_far, labelled, notes
from recpipe.report.run_plots import SAMPLES, SECONDS, column, quality_bars

LONGEST = 60
"""Characters of a name in a legend, which is then as wide as the plot."""
STOPPED = "Stopped early: these are the rounds finished so far."
Row = Mapping[str, Any]
"""A row of compare.json."""


def print_result(content: Mapping[str, Any], console: Console) -> None:
    """The comparison as two tables of 80 columns: speed, memory and traffic, then quality and parameters."""
    if content["partial"]:
        console.print("stopped early: what is finished so far", markup=False)
    for table in (_speed_table(content["rows"]), *_quality_tables(content["rows"])):
        console.print(terminal.drawn(table, "close"))
        console.print()
    terminal.print_lines(console, notes(content), folds=True)


def so_far(content: Mapping[str, Any]) -> list[RenderableType]:
    """The tables of the rounds that are finished, while others run, and what is wrong in them."""
    rows = content["rows"]
    return [
        f"so far: {how_far(content)}",
        terminal.drawn(_speed_table(rows), "close"),
        "",
        *(terminal.drawn(table, "close") for table in _quality_tables(rows)),
        *(f"! {fault}" for fault in faults(content)),
        "",
    ]


def _named(rows: Sequence[Row], heads: Sequence[Head], cells: Callable[[Row], Sequence[Cell | str]]) -> Table:
    """A table with a line for each row: its name, with a setting in each further line, and its ``cells``."""
    lines = [[Cell(label.lines[0], label.lines[1:]), *cells(row)] for label, row in labelled(rows)]
    return Table([Head("recipe", number=False), *heads], lines)


def _speed_table(rows: Sequence[Row]) -> Table:
    """Speed and ratio over all steps, the ratios of the two other speeds, memory and traffic."""
    heads = ("samples/s", "ratio", "95%\ninterval", "steady", "start\nto end", "memory", "cold\nbytes")
    return _named(
        rows,
        [Head(head) for head in heads],
        lambda row: (
            figures.count(row["samples_per_second"]["median"]),
            figures.decimal(row["ratio"], 3),
            figures.interval(row["ratio_interval"], 2),
            figures.decimal(row["steady"]["ratio"], 3),
            figures.decimal(row["end_to_end"]["ratio"], 3),
            figures.size(row["memory_bytes"]),
            figures.size(_moved(row["io"], "bytes")),
        ),
    )


def _wide_speed_table(rows: Sequence[Row]) -> Table:
    """The same for a page, with the lowest and highest speed, all intervals, waiting and peak memory."""
    ratios = ("ratio", "steady ratio", "start to end")
    heads = [Head("samples/s, all steps", small="min .. max")]
    heads += [Head(title, small="95% interval") for title in ratios]
    heads += map(Head, ("memory", "cold rows moved", "cold bytes moved", "waited", "peak RSS"))

    def cells(row: Row) -> list[Cell | str]:
        speed = row["samples_per_second"]
        ends = f"{figures.count(speed['min'])} .. {figures.count(speed['max'])}" if row["rounds"] else ""
        return [
            Cell(figures.count(speed["median"]), [ends]),
            *(
                Cell(
                    figures.decimal(of["ratio"], 3),
                    [figures.interval(of["ratio_interval"], 2)],
                    bold=of is row,
                )
                for of in (row, row["steady"], row["end_to_end"])
            ),
            figures.size(row["memory_bytes"]),
            figures.count(_moved(row["io"], "rows")),
            figures.size(_moved(row["io"], "bytes")),
            f"{figures.decimal(row['io']['wait_seconds'], 2)} s" if row["io"] else "-",
            figures.size(row["memory"].get("peak_rss_bytes")),
        ]

    return _named(rows, heads, cells)


def _quality_tables(rows: Sequence[Row], wide: bool = False) -> list[Table]:
    """Figures of quality and parameters, and their differences to the first row's; a table for each of
    several labels. ``wide``: for a page."""
    labels = dict.fromkeys(name for row in rows for name in row.get(BY_LABEL, {}))
    found = []
    for label in labels:
        names = quality_names(rows)
        none = dict.fromkeys((f"{key}{end}" for key in names for end in ("", "_difference")), None)
        own = [{**row, **row.get(BY_LABEL, {}).get(label, none)} for row in rows]
        table = _quality_table(own, wide)
        found.append(replace(table, heads=[replace(table.heads[0], title=label), *table.heads[1:]]))
    return found or [_quality_table(rows, wide)]


def _quality_table(rows: Sequence[Row], wide: bool) -> Table:
    names = shown_figures(rows)
    differences = {"max": "largest parameter difference", "rms": "root mean square"} if wide else {"max": ""}
    heads = [Head(head) for name in names for head in (title(name), "difference" if wide else "diff")]
    heads += [Head(title, narrow="" if wide else "param\ndiff") for title in differences.values()]
    return _named(
        rows,
        heads,
        lambda row: [
            *(
                text
                for key in names
                for text in (figures.decimal(row.get(key)), figures.signed(row.get(f"{key}_difference")))
            ),
            *(figures.scientific(row[f"{kind}_parameter_difference"]) for kind in differences),
        ],
    )


def _moved(io: Mapping[str, Any], unit: str) -> float | None:
    """Rows or bytes read plus those written."""
    return io[f"{unit}_read"] + io[f"{unit}_written"] if io else None


def write_html(content: Mapping[str, Any], path: Path) -> Path:
    """Write ``path``, compare.html, which needs no other file."""
    return html.write(_page(content, path.parent), path)


def _page(content: Mapping[str, Any], directory: Path) -> Page:
    rows, machine = content["rows"], content["environment"]
    lines = [label.line for label, _ in labelled(rows)]
    own = [f"{row['run']}/report.html" if row["run"] else "" for row in rows]
    links = [quote(page) if page and (directory / page).is_file() else None for page in own]

    def linked(table: Table, wide: bool = False) -> Table:
        named = [
            [replace(name, link=link, hint=row["name"] if name.small else ""), *cells]
            for row, link, (name, *cells) in zip(rows, links, table.rows, strict=True)
            if isinstance(name, Cell)
        ]
        return replace(table, rows=named, wide=wide)

    ratio = (
        "A ratio is the median over rounds of this row's speed divided by that of "
        f"{lines[0]} in the same round; its interval is a bootstrap over the rounds."
    )
    remarks = [Line(note, "warn" if note[0] in "*!~" else "soft") for note in notes(content)]
    sections = [
        Section("", [Line(STOPPED, "warn")] if content["partial"] else []),
        Section("Speed and traffic", [linked(_wide_speed_table(rows), wide=True), Line(ratio, "soft")]),
        Section("Quality and parameters", [*map(linked, _quality_tables(rows, wide=True)), *remarks]),
    ]
    if drawn := curves(rows):
        where = ", whose report its name in the tables links to" if any(links) else ""
        said = f"Of each row's first counted run{where}. Time is from the process's start, evaluation apart."
        if max(len(row["history"]) for row in rows) < 2:
            said += (
                " There was one evaluation; trainer.eval_every=0.1 makes a curve of ten, and is in no speed."
            )
        sections.append(Section("Quality and speed of all rows", [Line(said, "soft"), drawn]))
    if drawn := _plots(rows):
        sections.append(Section("Plots", [drawn]))
    sections.append(environment(machine))
    carried = [(name, " ".join(words) or "none") for name, words in content["overrides"].items()]
    sections.append(Section("", [Folded("Overrides carried over to each run", pairs(carried))]))
    names = ", ".join(lines)
    seeds = f", {content['seeds']} seeds" if content["seeds"] > 1 else ""
    lead = (
        "Interleaved runs, each in a fresh process, same data and seed: "
        f"{content['counted']} counted round{'' if content['counted'] == 1 else 's'} after "
        f"{content['warmup']} of warm-up{seeds} · {machine['cpu']}, {machine['threads']} threads"
    )
    heading = names if len(rows) < 5 and len(names) < 60 else f"{len(rows)} recipes compared"
    return Page("recpipe comparison", f"recpipe: {heading}", lead, sections)


def _plots(rows: Sequence[Row]) -> list[Plot]:
    """Speed, cold traffic, memory and quality of the rows that have been run."""
    each = zip(labelled(rows), legend(rows), strict=True)
    found = [(label.wrapped(plots.NAME_WIDTH), key, row) for (label, row), key in each if row["rounds"]]
    if not found:
        return []
    names, keys, done = zip(*found, strict=True)
    speeds = [row["samples_per_second"] for row in done]
    spread = [(speed["min"], speed["max"]) for speed in speeds]
    rows_moved, bytes_moved = ([_moved(row["io"], unit) for row in done] for unit in ("rows", "bytes"))
    kinds = {"resident rows": "resident_bytes", "row maps, policy, slab, buffers": "tier_overhead_bytes"}
    tiers = {name: [row["memory"].get(key, 0) for row in done] for name, key in kinds.items()}
    title = "Speed: median, lowest and highest"
    drawn = [plots.bars(title, names, [speed["median"] for speed in speeds], "samples/s", spread)]
    if any(len(row["rounds"]) > 1 for row in done):
        rounds = {
            key: (range(1, len(row["rounds"]) + 1), row["rounds"])
            for key, row in zip(keys, done, strict=True)
        }
        across, up = Axis("round", "count"), Axis("samples/s", from_zero=True)
        drawn.append(plots.curves("Speed by round", rounds, across, up))
    return [
        *drawn,
        plots.bars("Cold rows moved", names, rows_moved, "rows read and written"),
        plots.bars("Cold bytes moved", names, bytes_moved, "read and written", unit="bytes"),
        plots.stacked("Memory", names, tiers, "resident rows, and all beside them", "bytes"),
        *quality_bars(names, done),
    ]


def legend(rows: Sequence[Row]) -> list[str]:
    """Names for curves, which differ even if two rows have the same recipe."""
    lines = (figures.shortened(label.line, LONGEST) for label, _ in labelled(rows))
    return [f"{number}. {line}" for number, line in enumerate(lines, 1)]


def curves(rows: Sequence[Mapping[str, Any]]) -> list[Plot]:
    """Quality and training loss over wall time and over samples, speed over steps; of each row's first
    counted run."""
    names = legend(rows)
    drawn: list[Plot] = []
    histories = [row["history"] for row in rows]
    shown = shown_figures([point for history in histories for point in history])
    first = next((name for name in FIRST if name in shown), "eval_loss")
    drawn += _both(
        f"{title(first) if first in FIRST else 'loss'} on the held-out part",
        names,
        [(column(h, "seconds"), column(h, "samples"), column(h, first)) for h in histories],
    )
    series = [row["series"] for row in rows]
    drawn += _both("Training loss", names, [(s["seconds"], s["samples"], s["loss"]) for s in series])
    if any(s["step"] for s in series):
        speed = {
            name: (s["step"], s["samples_per_second"])
            for name, s in zip(names, series, strict=True)
            if s["step"]
        }
        drawn.append(plots.curves("Speed", speed, Axis("step", "count"), Axis("samples/s", from_zero=True)))
    return drawn


def _both(title: str, names: Sequence[str], values: Sequence[tuple[Values, Values, Values]]) -> list[Plot]:
    """One figure of all rows over seconds and, if it is more than one point of each, over samples;
    ``values``: of each row all three."""
    there = [
        (name, *row) for name, row in zip(names, values, strict=True) if any(y is not None for y in row[2])
    ]
    if not there:
        return []
    time = plots.seconds_axis(SECONDS, [seconds for _, seconds, _, _ in there])
    over_time = {name: (seconds, y) for name, seconds, _, y in there}
    over_samples = {name: (samples, y) for name, _, samples, y in there}
    losses = "loss" in title.lower()
    up = plots.loss_axis("", [y for _, _, _, y in there]) if losses else Axis()
    drawn = [plots.curves(f"{title}, by wall time", over_time, time, up)]
    if any(len(y) > 1 for _, _, _, y in there):
        drawn.append(plots.curves(f"{title}, by samples", over_samples, SAMPLES, up))
    return drawn
