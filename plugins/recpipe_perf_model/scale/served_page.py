"""The predictions of ``scale.inference=true``: tables on the terminal, and scale.html; from scale.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from recpipe.common.console import show
from recpipe.report import figures, html, plots, terminal
from recpipe.report.page import Head, Page, Plot, Section, Table
from recpipe.report.plots import Axis
from recpipe_perf_model.scale.page import milliseconds

COLUMNS = ("Gbit/s", "shards", "p50", "p95", "p99", "at most", "machines", "power")


def show_table(told: Mapping[str, Any], page: Path) -> None:
    """Print the tables, what they come to, and where the page is."""

    def draw(out: Console) -> None:
        out.print(terminal.drawn(_predictions(told["predictions"])))
        if told["growth"]:
            out.print(terminal.drawn(_growth(told)))
        terminal.print_lines(out, sentences(told), folds=True)

    show(draw)
    terminal.print_place(page)


def _predictions(found: Sequence[Mapping[str, Any]]) -> Table:
    rows = [
        [
            f"{each['gbit']:g}",
            figures.count(each["shards"]),
            *(milliseconds(each[name]) for name in ("p50", "p95", "p99")),
            f"{figures.short(each['requests_per_second'])}/s",
            figures.count(each["machines"]),
            kilowatts(each["watts"]),
        ]
        for each in found
    ]
    return Table([Head(name) for name in COLUMNS], rows, wide=True)


def kilowatts(watts: float) -> str:
    """Three digits."""
    return f"{watts / 1000:,.3g} kW" if watts < 1e6 else f"{watts / 1e6:,.3g} MW"


def _growth(told: Mapping[str, Any]) -> Table:
    """A row a year, with the p99 of each link."""
    links = sorted({each["gbit"] for each in told["growth"]})
    rows = []
    for year in sorted({each["year"] for each in told["growth"]}):
        own = {each["gbit"]: each for each in told["growth"] if each["year"] == year}
        last = own[max(own)]
        rows.append(
            [
                str(year),
                figures.size(last["model_bytes"]),
                figures.count(last["shards"]),
                figures.count(last["machines"]),
                kilowatts(last["watts"]),
                *(milliseconds(own[gbit]["p99"]) if gbit in own else "-" for gbit in links),
            ]
        )
    heads = [Head(name) for name in ("year", "model", "shards", "machines", "power")]
    links_of = (Head(f"p99, {gbit:g} Gbit/s", narrow=f"p99,\n{gbit:g}\nGbit/s") for gbit in links)
    return Table([*heads, *links_of], rows, wide=True)


def sentences(told: Mapping[str, Any]) -> list[str]:
    """What the figures are of, and what they are worth."""
    model, last = told["model"], told["predictions"][-1]
    found = [
        f"{model['title']}: {model['tables']:,} tables, {figures.short(model['rows'])} rows, "
        f"{figures.size(model['bytes'])}; {model['lookups']:,.4g} lookups of a sample, and "
        f"{model['dense_us']:,.3g} us for its dense part; cores of a main server: {told['threads']}.",
        f"{told['load']:,.6g} requests/s of {told['candidates']:,} candidates, who share "
        f"{100 * told['shared']:.3g}% of their lookups; {told['delay_us']:g} us between two machines.",
        f"{told['server']['title']}; constants of work: {told['costs']['source']}.",
        f"With {last['shards']:,} shards at {last['gbit']:g} Gbit/s each of {last['cells']:,} sets of "
        f"shards has {last['mains']:,} main servers, which are busy {100 * last['main_busy']:.0f}% of the "
        f"time, and the busiest shard {100 * last['shard_busy']:.0f}%; a request waits "
        f"{milliseconds(last['waited'])}, and its batch {milliseconds(last['fetched'])} for shards. More "
        f"requests are limited by {last['limit']}.",
    ]
    if told["growth"]:
        found.append(
            f"Years: {told['yearly']:g} times as many rows after each, on as few shards as hold them; "
            "machines and power are those of the fastest link."
        )
    found += [f"Left out: {why}." for why in dict.fromkeys(each["why"] for each in told["refused"])]
    found += [f"Given: {note}." for note in told["notes"]]
    if told["assumed"]:
        found.append(f"Assumed, without a source: {', '.join(told['assumed'])}.")
    return [*found, told["checked"]]


def write(told: Mapping[str, Any], directory: Path) -> Path:
    """Write ``directory/scale.html`` and return its path."""
    sources = [Head("constant", number=False), Head("source", number=False)]
    costs = [
        (name, f"{value:g}")
        for name, value in told["costs"]["costs"].items()
        if not isinstance(value, list | tuple)
    ]
    sections = [Section("", [_predictions(told["predictions"]), *sentences(told), list(_plots(told))])]
    if told["growth"]:
        sections.append(Section("Growth", [_growth(told)]))
    sections += [
        Section("Microseconds of work", [Table([Head("constant", number=False), Head("us")], costs)]),
        Section("Sources", [Table(sources, list(told["server"]["sources"].items()))]),
    ]
    lead = f"{told['model']['title']} on shards of {told['server']['title']}. Predicted; nothing was served."
    heading = "recpipe: serving on machines that are not here"
    return html.write(Page("recpipe: scale on paper", heading, lead, sections), directory / "scale.html")


def _plots(told: Mapping[str, Any]) -> Iterator[Plot]:
    of_link: dict[str, list[Mapping[str, Any]]] = {}
    for each in told["predictions"]:
        of_link.setdefault(f"{each['gbit']:g} Gbit/s", []).append(each)
    if max(map(len, of_link.values())) < 2:
        return
    axis = Axis("shards", "count", log=True)
    for title, key, unit in (("p99", "p99", "seconds"), ("Machines", "machines", "count")):
        lines = {
            name: ([each["shards"] for each in own], [each[key] for each in own])
            for name, own in of_link.items()
        }
        yield plots.curves(title, lines, axis, Axis(title, unit, from_zero=True))  # type: ignore[arg-type]
