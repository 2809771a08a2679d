"""The predictions of ``task=scale``: a table on the terminal, and scale.html; from scale.json's content."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from recpipe.common.console import show
from recpipe.report import figures, html, plots, terminal
from recpipe.report.page import Head, Line, Page, Plot, Section, Table
from recpipe.report.plots import Axis

COLUMNS = ("GPUs", "batch", "samples/s", "per GPU", "step", "bound by", "memory", "time")
TABLES = 8
"""Tables that are told one by one on the terminal."""
_MANY = 40
"""The same on the page."""


def show_table(told: Mapping[str, Any], page: Path) -> None:
    """Print the table, that of the largest tables, what it comes to, and where the page is."""

    def draw(out: Console) -> None:
        out.print(terminal.drawn(_predictions(told)))
        out.print(terminal.drawn(_tables(told, TABLES)))
        terminal.print_lines(out, sentences(told), folds=True)

    show(draw)
    terminal.print_place(page)


def _predictions(told: Mapping[str, Any]) -> Table:
    rows = []
    for each in told["predictions"]:
        what, waited = next(iter(each["bounds"].items()))
        whole = each["seconds"] if told["samples"] else each["seconds_to_quality"]
        scale, unit = figures.time_unit(whole or 0.0)
        rows.append(
            [
                figures.count(each["gpus"]),
                figures.count(each["batch_size"]),
                figures.short(each["samples_per_second"]),
                f"{100 * each['efficiency']:.0f}%",
                milliseconds(each["step_seconds"]),
                f"{what} {100 * waited / each['step_seconds']:.0f}%",
                figures.size(each["hbm_bytes"]),
                "-" if whole is None else f"{whole / scale:.3g} {unit}",
            ]
        )
    return Table([Head(name, number=name != "bound by") for name in COLUMNS], rows, wide=True)


def milliseconds(seconds: float) -> str:
    """Three digits; microseconds for what takes less than one of them."""
    return f"{1000 * seconds:.3g} ms" if seconds >= 1e-6 else f"{1e6 * seconds:.2g} us"


def _tables(told: Mapping[str, Any], most: int) -> Table:
    """The tables whose rows take longest."""
    heads = [
        Head("table", number=False),
        Head("rows"),
        Head("placed", number=False),
        Head("bytes"),
        Head("messages a step", narrow="messages"),
        Head("memory traffic", narrow="traffic"),
        Head("time of a part", narrow="time"),
    ]
    rows = [
        [
            figures.shortened(each["name"]),
            figures.short(each["rows"]),
            f"{each['kind']}, {'all' if each['gpus'] == 'all' else each['parts']}",
            figures.size(each["bytes"]),
            figures.size(each["messages"]),
            figures.size(each["memory_traffic"]),
            milliseconds(each["seconds"]),
        ]
        for each in told["tables"][:most]
    ]
    return Table(heads, rows, wide=True)


def sentences(told: Mapping[str, Any]) -> list[str]:
    """What the figures are of, and what they are worth."""
    model, last = told["model"], told["predictions"][-1]
    found = [
        f"{model['title']}: {model['tables']:,} tables, {figures.short(model['parameters'])} parameters, "
        f"{figures.size(model['bytes'])} with the state of {model['optimizer']}; "
        f"{model['lookups']:,.4g} lookups and {figures.short(model['flops'])} operations (forward) a sample.",
        f"{told['machine']['title']}; {told['software']} software, products in {told['precision']}, messages "
        f"in {told['messages']}.",
    ]
    if told["samples"]:
        found.append(f"Time: to train {told['samples']:,} samples.")
    elif any(each["seconds_to_quality"] for each in told["predictions"]):
        found.append(f"Time: to {model['quality']}, by the samples that are published for this batch size.")
    parts = ", ".join(f"{what} {milliseconds(seconds)}" for what, seconds in list(last["bounds"].items())[:4])
    found.append(f"The step on {last['gpus']:,} GPUs waits for {parts}.")
    if last["missed"]:
        slow = last["rows"]["dram"] + last["rows"]["ssd"]
        found.append(
            f"{figures.size(slow)} of a GPU's rows are not in its memory; {100 * last['missed']:.3g}% of the "
            "rows of a batch are fetched and written back."
        )
    found += [f"Left out: {each['why']}." for each in told["refused"]]
    found += [f"Given: {note}." for note in told["notes"]]
    if told["assumed"]:
        found.append(f"Assumed, without a source: {', '.join(told['assumed'])}.")
    return [*found, told["checked"]]


def write(told: Mapping[str, Any], directory: Path) -> Path:
    """Write ``directory/scale.html`` and return its path."""
    note = "All parts together; those whose rows take longest. scale.json has all of them."
    sources = [Head("constant", number=False), Head("source", number=False)]
    sections = [
        Section("", [_predictions(told), *sentences(told), list(_plots(told))]),
        Section(
            f"Tables on {told['predictions'][-1]['gpus']} GPUs", [_tables(told, _MANY), Line(note, "soft")]
        ),
        Section("Sources", [Table(sources, list(told["machine"]["sources"].items()))]),
    ]
    lead = f"{told['model']['title']} on {told['machine']['title']}. Predicted; nothing was trained."
    heading = "recpipe: training on machines that are not here"
    return html.write(Page("recpipe: scale on paper", heading, lead, sections), directory / "scale.html")


def _plots(told: Mapping[str, Any]) -> Iterator[Plot]:
    found = told["predictions"]
    if len(found) < 2:
        return
    gpus = [each["gpus"] for each in found]
    axis = Axis("GPUs", "count", log=True)
    per_gpu = found[0]["samples_per_second"] / gpus[0]
    rates = {
        "predicted": (gpus, [each["samples_per_second"] for each in found]),
        "in proportion": (gpus, [per_gpu * count for count in gpus]),
    }
    yield plots.curves("Samples per second", rates, axis, Axis("samples/s", "count", log=True))
    what = dict.fromkeys(name for each in found for name in each["bounds"])
    parts = {name: (gpus, [each["bounds"].get(name, 0.0) for each in found]) for name in what}
    yield plots.curves("What a step waits for", parts, axis, Axis("time", "seconds", from_zero=True))
