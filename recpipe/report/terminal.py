"""Shows a report's tables and lines on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as Drawn
from rich.text import Text

from recpipe.common.console import show
from recpipe.report.page import Table

LAYOUTS: Mapping[str, Any] = {
    "free": {"pad_edge": False},
    "wide": {"pad_edge": False, "padding": (0, 2, 0, 0)},
    "close": {"show_edge": False, "pad_edge": False, "padding": (0, 1, 0, 0)},
    "tight": {"show_edge": False, "padding": 0},  # the box leaves one space between columns
}
"""How much room there is around cells."""


def drawn(table: Table, layout: str = "free") -> Drawn:
    """``table`` for rich, in one of ``LAYOUTS``.

    Texts may be folded into several lines, but not numbers, which would be misread, nor names of pairs; in
    the tight layout numbers are not cut either.
    """
    made = Drawn(box=box.SIMPLE_HEAD, show_header=bool(table.heads), **LAYOUTS[layout])
    if not table.heads:
        made.add_column(style="bold", no_wrap=True)
        made.add_column(overflow="fold")
    for index, head in enumerate(table.heads):
        whole = head.number or head.whole
        column = [row[index][0].text for row in table.cells]
        made.add_column(
            head.narrow or head.title,
            justify="right" if head.number else "left",
            overflow="fold",
            no_wrap=whole,
            min_width=width([head.narrow or head.title, *column]) if whole and layout == "tight" else None,
        )
    for number, row in enumerate(table.cells, 1):
        last = table.sums and number == len(table.rows)
        if last:
            made.add_section()
        texts = [
            Text(
                "\n".join([cell.text, *(f" {line}" for line in cell.small)]),
                "bold red" if cell.bad else "bold" if cell.bold else "",
            )
            for cell, _ in row
        ]
        made.add_row(*texts, style="bold" if last else None)
    return made


def width(texts: Iterable[str]) -> int:
    """Characters of the longest line of ``texts``."""
    return max(len(line) for text in texts for line in text.split("\n"))


def print_lines(console: Console, lines: Iterable[str], folds: bool = False) -> None:
    """Print ``lines`` as they are; if it ``folds`` them, at words and not at the terminal's edge."""
    for line in lines:
        console.print(line, soft_wrap=not folds, markup=False, highlight=False)


def show_table(table: Table, lines: Iterable[str]) -> None:
    """Print a table and the lines below it, also into recpipe.log."""

    def draw(out: Console) -> None:
        out.print(drawn(table))
        print_lines(out, lines, folds=True)

    show(draw)


def print_place(page: Path, console: Console | None = None) -> None:
    """Print the path of the report."""
    show(lambda out: print_lines(out, [f"report: {page}"]), console)
