"""The miss rates of ``task=misses``: a table on the terminal, and misses.html; from misses.json's content."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from recpipe.report import figures, html, plots, terminal
from recpipe.report.page import Cell, Head, Line, Page, Plot, Section, Table
from recpipe.report.plots import Axis

SHOWN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0)
"""Shares of all rows that the table has, beside the recipe's own."""
NAMES = {"lru": "lru", "lfu": "lfu", "hot": "hot set"}
"""Policies by their keys."""
_LITTLE = 0.05
"""A share of misses that is worth a sentence."""


def show_table(told: Mapping[str, Any], page: Path) -> None:
    """Print the table, what it comes to, and where the page is."""
    terminal.show_table(_table(told), sentences(told))
    terminal.print_place(page)


def _table(told: Mapping[str, Any]) -> Table:
    """Misses and reads by budget; the recipe's own is bold."""
    misses = [Head(f"{name} misses", narrow=f"{name}\nmisses") for name in NAMES.values()]
    reads = [Head(f"{name} reads", small="rows a batch", narrow=f"{name}\nreads") for name in ("lru", "lfu")]
    own, rows = told["budget"]["share"], []
    for at, share in enumerate(told["shares"]):
        if share in SHOWN or share == own:
            cells = [f"{100 * share:.3g}%", figures.size(share * told["bytes"])]
            cells += [_percent(told[name]["missed"][at]) for name in NAMES]
            cells += [figures.count(told[name]["fetched"][at]) for name in ("lru", "lfu")]
            rows.append([Cell(cell, bold=share == own) for cell in cells])
    return Table([Head("budget"), Head("memory"), *misses, *reads], rows, wide=True)


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
    lead = (
        f"{figures.count(told['batches'])} batches of {figures.count(told['batch_size'])} samples from the "
        "start of training; nothing was trained."
    )
    note = (
        "Bold: the recipe's own budget. The hot set has the rows most looked up in the first "
        f"{figures.count(told['learnt_from'])} batches, and is judged by the others; lru and lfu begin "
        "empty. Che's approximation knows how often rows are looked up but not in which order, and no row's "
        "first lookup."
    )
    sections = [
        Section("", sentences(told)),
        Section("All tables", [_table(told), Line(note, "soft"), list(drawn(told))]),
    ]
    if told["windows"]:
        heads = ("batches", "memory for their rows", "lookups of rows that none of them had")
        rows = [
            (figures.count(each["batches"]), figures.size(each["bytes"]), _percent(each["missed"]))
            for each in told["windows"]
        ]
        sections.append(Section("Lookahead", [Table([Head(head) for head in heads], rows)]))
    page = Page("recpipe: miss rates", "recpipe: what caches would miss", lead, sections)
    return html.write(page, directory / "misses.html")


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
        batches = [window["batches"] for window in told["windows"]]
        ahead = Axis("batches of lookahead", "count", log=True)
        for title, key, axis in (
            ("Lookups of rows that no batch in the window had", "missed", misses),
            ("Memory for the rows of a window", "bytes", Axis("distinct rows", "bytes", from_zero=True)),
        ):
            found = {"": (batches, [window[key] for window in told["windows"]])}
            yield plots.curves(title, found, ahead, axis)
