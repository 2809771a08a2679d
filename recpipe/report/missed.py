"""The miss rates of ``task=misses``: a table on the terminal, and misses.html; from misses.json's content."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from recpipe.common.console import show
from recpipe.report import figures, html, plots
from recpipe.report.plots import Axis, Plot
from recpipe.report.record import replace_file
from recpipe.report.terminal import print_place

SHOWN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0)
"""Shares of all rows that the table has, beside the recipe's own."""
NAMES = {"lru": "lru", "lfu": "lfu", "hot": "hot set"}
"""Policies by their keys."""
_LITTLE = 0.05
"""A share of misses that is worth a sentence."""


def show_table(told: Mapping[str, Any], page: Path) -> None:
    """Print the table, what it comes to, and where the page is."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    columns = (
        "budget",
        "memory",
        *(f"{name}\nmisses" for name in NAMES.values()),
        "lru\nreads",
        "lfu\nreads",
    )
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for own, cells in _rows(told):
        table.add_row(*cells, style="bold" if own else None)

    def draw(out: Console) -> None:
        out.print(table)
        for line in sentences(told):
            out.print(line, markup=False, highlight=False)

    show(draw)
    print_place(page)


def _rows(told: Mapping[str, Any]) -> Iterator[tuple[bool, list[str]]]:
    """The table's rows, and of each whether it is the recipe's own budget."""
    own = told["budget"]["share"]
    for at, share in enumerate(told["shares"]):
        if share in SHOWN or share == own:
            cells = [f"{100 * share:.3g}%", figures.size(share * told["bytes"])]
            cells += [_percent(told[name]["missed"][at]) for name in NAMES]
            cells += [figures.count(told[name]["fetched"][at]) for name in ("lru", "lfu")]
            yield share == own, cells


def sentences(told: Mapping[str, Any]) -> list[str]:
    """What the figures are of, and what they come to."""
    at = told["shares"].index(told["budget"]["share"])
    own = {name: told[name]["missed"][at] for name in ("lru", "lfu")}
    best = min(own, key=lambda name: 1.0 if own[name] is None else own[name])
    other = "lfu" if best == "lru" else "lru"
    found = [
        f"Misses are shares of {figures.short(told['lookups'])} lookups in {told['batches']:,} batches of "
        f"{told['batch_size']:,} samples; reads are rows a batch. "
        f"{_percent(told['lru']['missed'][-1])} are of rows that no batch before had, "
        "which every cache misses (all lookups of such a row in its first batch count).",
        f"At this recipe's budget, {figures.size(told['budget']['bytes'])}, {best} misses "
        f"{_percent(own[best])}, and {other} {_percent(own[other])}.",
    ]
    first = told["lru"]["missed"][-1]
    enough = next(
        (n for n, miss in enumerate(told["lfu"]["missed"]) if miss - first <= _LITTLE * (1 - first)), None
    )
    if enough is not None and enough + 1 < len(told["shares"]):
        share = told["shares"][enough]
        found.append(
            f"With {figures.size(share * told['bytes'])} ({100 * share:.3g}%) lfu misses at most one "
            "in twenty of the lookups that a cache can have."
        )
    if None in told["lru"]["missed"]:
        found.append("lru is not told where a batch looks up more rows than fit.")
    if told["sampled"] > 1:
        found.append(f"Rows are sampled, 1 of {told['sampled']}; the most popular ones are all followed.")
    return found


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f}%"


def write(told: Mapping[str, Any], directory: Path) -> Path:
    """Write ``directory/misses.html`` and return its path."""
    page = html.page("misses.html.j2").render(
        told=told, names=NAMES, rows=list(_rows(told)), sentences=sentences(told), plots=list(drawn(told))
    )
    return replace_file(directory / "misses.html", page)


def drawn(told: Mapping[str, Any]) -> Iterator[Plot]:
    """The page's plots."""
    budgets = [share * told["bytes"] for share in told["shares"]]
    memory = Axis("memory for rows", "bytes", log=True)
    misses = Axis("lookups that miss", "share", from_zero=True)
    every = {title: (budgets, told[name]["missed"]) for name, title in NAMES.items()}
    every["lru, by Che's approximation"] = (budgets, told["che"])
    yield plots.curves("Misses of all tables", every, memory, misses)
    reads = {title: (budgets, told[name]["fetched"]) for name, title in NAMES.items()}
    yield plots.curves("Rows to read", reads, memory, Axis("rows a batch", "count", from_zero=True))
    if told["tables"]:
        alone = {
            f"{figures.shortened(table['name'])} ({figures.short(table['rows'])} rows)": (
                told["shares"],
                table["lfu"]["missed"],
            )
            for table in told["tables"]
            if table["lookups"]
        }
        share = Axis("of the table's rows in memory", "share", log=True)
        yield plots.curves("lfu, the largest tables each alone", alone, share, misses)
    if len(told["windows"]) > 1:
        ahead = [window["batches"] for window in told["windows"]]
        found = {"": (ahead, [window["missed"] for window in told["windows"]])}
        yield plots.curves(
            "Lookups of rows that no batch in the window had",
            found,
            Axis("batches of lookahead", "count", log=True),
            misses,
        )
        held = {"": (ahead, [window["bytes"] for window in told["windows"]])}
        yield plots.curves(
            "Memory for the rows of a window",
            held,
            Axis("batches of lookahead", "count", log=True),
            Axis("distinct rows", "bytes", from_zero=True),
        )
