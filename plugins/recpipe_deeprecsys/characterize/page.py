"""What ``task=characterize`` found: tables on the terminal, and characterize.html; from characterize.json's
content."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from recpipe.common.console import show
from recpipe.report import figures, html, missed, plots, run_plots, terminal
from recpipe.report.page import Cell, Folded, Head, Line, Page, Part, Plot, Section, Table, environment
from recpipe.report.plots import Axis
from recpipe_deeprecsys.characterize.operators import CLASSES

LONGEST = 8
"""Operators that the terminal shows, those that take longest."""
ON_PAGE = 25
"""The same on the page, which has the others folded."""
NARROW = {
    "FC": "FC",
    "embedding lookup": "lookup",
    "interaction": "inter-\naction",
    "tensor manipulation": "manipu-\nlation",
    "other": "other",
}
ROW_SIZE = "256"
"""Bytes of the rows at random whose roof is drawn."""


def show_tables(told: Mapping[str, Any], path: Path) -> None:
    """Print the classes' shares, the operators that take longest, and where the page is."""

    def draw(out: Console) -> None:
        out.print(terminal.drawn(shares(told["models"]), "close"))
        for model in told["models"]:
            batch = model["batches"][-1]
            if len(told["models"]) == 1:
                out.print(terminal.drawn(operators(batch["operators"][:LONGEST], narrow=True), "close"))
            if model["precision"]:
                out.print(terminal.drawn(precision(model["precision"]), "close"))
            terminal.print_lines(out, sentences(model), folds=True)

    show(draw)
    terminal.print_place(path)


def shares(models: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each model and batch size: its step, and the share of each class."""
    heads = [
        Head("model", number=False),
        Head("samples"),
        Head("step ms", narrow="step\nms"),
        *(Head(name, narrow=NARROW[name]) for name in CLASSES),
        Head("between operators", narrow="between"),
    ]
    rows: list[list[str]] = []
    for model in models:
        for number, batch in enumerate(model["batches"]):
            parts = [batch["classes"][name]["share"] for name in CLASSES]
            rows.append(
                [
                    figures.shortened(model["name"], 22) if not number else "",
                    figures.count(batch["batch_size"]),
                    milliseconds(batch["step_seconds"]),
                    *(percent(share) for share in (*parts, batch["between"]["share"])),
                ]
            )
    return Table(heads, rows, wide=True)


def operators(rows: Sequence[Mapping[str, Any]], narrow: bool = False) -> Table:
    """A row for each kind of call."""
    heads = [
        Head("operator", number=False),
        Head("sizes", number=False),
        *(() if narrow else (Head("class", number=False), Head("phase", number=False), Head("calls"))),
        Head("FLOP"),
        Head("bytes"),
        Head("FLOP/byte", narrow="FLOP/\nbyte"),
        *(() if narrow else (Head("FLOP/weight"),)),
        Head("ms"),
        Head("share"),
        Head("bound by", number=False, narrow="bound"),
        Head("of its roof", narrow="of its\nroof"),
    ]
    drawn: list[list[Cell | str]] = []
    for row in rows:
        more = [row["class"], row["phase"], f"{row['calls']:g}"]
        cells: list[Cell | str] = [
            figures.shortened(row["name"], 20) if narrow else row["name"],
            figures.shortened(row["shape"], 20) if narrow else row["shape"],
            *(() if narrow else more),
            figures.short(row["flops"]),
            figures.size(row["bytes"]),
            "-" if row["intensity"] is None else f"{row['intensity']:.3g}",
            *(() if narrow else ("-" if row["per_weight"] is None else f"{row['per_weight']:,.4g}",)),
            milliseconds(row["seconds"]),
            percent(row["share"]),
            row["bound"],
            percent(row["of_roof"]),
        ]
        drawn.append(cells)
    return Table(heads, drawn, wide=True)


def classes(batch: Mapping[str, Any]) -> Table:
    """A row for each class of one batch size."""
    heads = [
        Head("class", number=False),
        *map(Head, ("FLOP", "bytes", "FLOP/byte", "FLOP/weight", "ms", "share", "of its roofs")),
    ]
    rows = []
    for name in CLASSES:
        own = batch["classes"][name]
        rows.append(
            [
                name,
                figures.short(own["flops"]),
                figures.size(own["bytes"]),
                "-" if own["intensity"] is None else f"{own['intensity']:.3g}",
                "-" if own["per_weight"] is None else f"{own['per_weight']:,.4g}",
                milliseconds(own["seconds"]),
                percent(own["share"]),
                "-" if own["of_roof"] is None else percent(own["of_roof"]),
            ]
        )
    between = batch["between"]
    rows.append(
        ["between operators", *["-"] * 4, milliseconds(between["seconds"]), percent(between["share"]), "-"]
    )
    return Table(heads, rows)


def sentences(model: Mapping[str, Any]) -> list[str]:
    """What the figures are of, and what is doubtful about them."""
    machine, found = model["machine"], []
    rates = ", ".join(f"{name} {figures.short(rate)}FLOP/s" for name, rate in machine["flops_per_s"].items())
    memory = machine["stream"][-1][1]
    found.append(
        f"{model['name']}, {model['mode']}: {machine['threads']} threads; this machine's limits: {rates}, "
        f"memory {figures.short(memory)}B/s."
    )
    for batch in model["batches"]:
        if batch["compiled_seconds"] is not None:
            times = batch["step_seconds"] / batch["compiled_seconds"]
            found.append(
                f"Compiled, {figures.count(batch['batch_size'])} samples take "
                f"{milliseconds(batch['compiled_seconds'])} ms, {times:.2f} times as fast as operator by "
                "operator."
            )
        if batch["above"]:
            found.append(
                f"Faster than this machine's limits, though these were measured anew, at "
                f"{figures.count(batch['batch_size'])} samples: {', '.join(batch['above'])}. The machine was "
                "not quiet: run it again when it is."
            )
    if model["measured_again"] and not any(batch["above"] for batch in model["batches"]):
        found.append("The limits were measured anew, for an operator was faster than they allowed.")
    if model["disturbed"]:
        found.append(
            f"The limits were measured while {model['disturbed']}: they are higher on a quiet machine."
        )
    if warning := figures.disturbed(model["others_cpu_share"], "these steps"):
        found.append(f"{warning[:1].upper()}{warning[1:]}: alone it is faster.")
    if reuse := model["reuse"]:
        found.append(reused(reuse))
    return found


def reused(reuse: Mapping[str, Any]) -> str:
    """How far apart lookups of a row are, in a sentence."""
    known = [(share, lookups) for share, lookups in zip(reuse["shares"], reuse["lru"]["missed"], strict=True)]
    first = known[-1][1]
    told = f"{percent(first)} of lookups are of a row that no batch before looked up"
    middle = next((share for share, missed in known if missed is not None and missed <= 0.5), None)
    if middle is not None:
        rows = figures.short(middle * reuse["rows"])
        told += f"; half of all are of one that is among the {rows} rows looked up last"
    return f"{told}."


def write(told: Mapping[str, Any], directory: Path) -> Path:
    """Write ``directory/characterize.html`` and return its path."""
    models = told["models"]
    sections = [Section("", [shares(models), list(_beside(models))])]
    for model in models:
        sections += _of_model(model)
    sections.append(environment(told["environment"]))
    lead = (
        "Operators timed where they run in a step, against the limits that were measured on this machine. "
        "An operator's roof is the least time that its operations or its bytes can take; bytes of memory "
        "that fits a cache come at that cache's rate."
    )
    heading = "recpipe: what a step's operators do"
    return html.write(Page("recpipe: operators", heading, lead, sections), directory / "characterize.html")


def _beside(models: Sequence[Mapping[str, Any]]) -> Iterator[Plot]:
    pairs = [(model, batch) for model in models for batch in model["batches"]]
    names = [
        f"{model['name']}\n{figures.count(batch['batch_size'])} samples"
        if len(models) > 1
        else f"{figures.count(batch['batch_size'])} samples"
        for model, batch in pairs
    ]
    parts = {name: [batch["classes"][name]["share"] for _, batch in pairs] for name in CLASSES}
    parts["between operators"] = [batch["between"]["share"] for _, batch in pairs]
    yield plots.stacked("Share of a step by class of operators", names, parts, "of a step", "share")


def _of_model(model: Mapping[str, Any]) -> Iterator[Section]:
    for batch in model["batches"]:
        rows = batch["operators"]
        parts: list[Part] = [[roofline(batch, model["machine"])], classes(batch), operators(rows[:ON_PAGE])]
        if len(rows) > ON_PAGE:
            parts.append(Folded(f"{len(rows) - ON_PAGE} others", operators(rows[ON_PAGE:])))
        yield Section(f"{model['name']}: {figures.count(batch['batch_size'])} samples", parts)
    if model["precision"]:
        note = (
            "Each row has all layers so, emulated; errors are of a layer's results on the float model's "
            "inputs, behind its ReLU, relative, the root of the mean square over layers."
        )
        yield Section(
            f"{model['name']}: reduced precision", [precision(model["precision"]), Line(note, "soft")]
        )
    drawn: list[Plot] = run_plots.skew(model) if model["skew"] else []
    drawn += list(missed.drawn(model["reuse"])) if model["reuse"] else []
    parts = [*sentences(model), tables(model["tables"]), drawn]
    if model["reuse"]:
        note = (
            "A lookup misses LRU of n rows if n other rows or more were looked up since its row was: the "
            "curve of lru is the distribution of reuse distances."
        )
        parts.append(Line(note, "soft"))
    yield Section(f"{model['name']}: tables and ids", parts)


def precision(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each setting of the studies of reduced precision."""
    heads = [Head("study", number=False), Head("setting", number=False)]
    heads += [
        Head("bits"),
        Head("outliers", narrow="out-\nliers"),
        Head("sums saturated", narrow="satu-\nrated"),
        Head("error of layers", narrow="error"),
        Head("NE"),
        Head("loss of NE", narrow="loss"),
    ]
    drawn = [
        [
            row["study"],
            row["setting"],
            "-" if row["bits"] is None else str(row["bits"]),
            *("-" if row[key] is None else f"{100 * row[key]:.3g}%" for key in ("outliers", "saturated")),
            f"{row['error']:.2e}",
            f"{row['ne']:.5f}",
            f"{100 * row['ne_loss']:+.4f}%",
        ]
        for row in rows
    ]
    return Table(heads, drawn, wide=True)


def tables(found: Sequence[Mapping[str, Any]]) -> Table:
    """Memory by table, the largest first."""
    heads = [Head("table", number=False), Head("type", number=False)]
    heads += map(Head, ("rows", "columns", "weights", "optimizer state"))
    rows = [
        [
            table["name"],
            table["type"],
            figures.count(table["rows"]),
            figures.count(table["dim"]),
            figures.size(table["bytes"]),
            figures.size(table["state_bytes"]),
        ]
        for table in sorted(found, key=lambda table: -table["bytes"])
    ]
    weights, state = (sum(table[key] for table in found) for key in ("bytes", "state_bytes"))
    total = ["all", "", figures.count(sum(table["rows"] for table in found)), ""]
    return Table(heads, [*rows, [*total, figures.size(weights), figures.size(state)]], sums=True)


def roofline(batch: Mapping[str, Any], machine: Mapping[str, Any]) -> Plot:
    """Operations per second against operations per byte: the machine's roofs, and a dot for each kind of call
    that computes something."""
    dots = [row for row in batch["operators"] if row["intensity"] and row["flops_per_s"]]
    low = min([0.05, *(row["intensity"] for row in dots)])
    peak = machine["flops_per_s"]["float32"]
    memory = machine["stream"][-1][1]
    high = max([4 * peak / memory, *(row["intensity"] for row in dots)])
    rates = {"memory": memory, "the nearest cache": machine["stream"][0][1]}
    if ROW_SIZE in machine["rows"]:
        rates[f"random rows of {ROW_SIZE} bytes"] = machine["rows"][ROW_SIZE][-1][1]
    series: dict[str, tuple[list[float | None], list[float | None]]] = {}
    for name, rate in rates.items():
        corner = max(low, min(high, peak / rate))
        series[name] = ([low, corner, high], [min(peak, rate * x) for x in (low, corner, high)])
    for name in CLASSES:
        own = [row for row in dots if row["class"] == name]
        if own:
            series[name] = ([row["intensity"] for row in own], [row["flops_per_s"] for row in own])
    title = f"Roofline, {figures.count(batch['batch_size'])} samples, float32"
    x, y = Axis("operations per byte", log=True), Axis("operations per second", log=True)
    return plots.curves(title, series, x, y, dots=CLASSES)


def milliseconds(seconds: float) -> str:
    """Three digits of milliseconds."""
    return f"{1e3 * seconds:.3g}"


def percent(share: float) -> str:
    """With a decimal where it is small."""
    return f"{100 * share:.0f}%" if share >= 0.1 else f"{100 * share:.1f}%"
