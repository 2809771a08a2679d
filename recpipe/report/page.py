"""What a report says, described once: pages of sections, and these of tables, plots and sentences.

``recpipe.report.html`` shows a page, ``recpipe.report.terminal`` its tables; plots are drawn by
``recpipe.report.plots``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from markupsafe import Markup

from recpipe.report import figures


@dataclass(frozen=True)
class Head:
    """The head of a table's column. Columns of numbers are flush right."""

    title: str
    number: bool = True
    small: str = ""
    """A second line in small letters; on a page alone."""
    narrow: str = ""
    """The title on several lines, for a terminal."""
    whole: bool = False
    """Whether its texts stay on one line of a terminal, as numbers do."""


@dataclass(frozen=True)
class Cell:
    """A table's cell that is more than a text."""

    text: str
    small: Sequence[str] = ()
    """Further lines, in small letters on a page."""
    bold: bool = False
    bad: bool = False
    """Whether it is shown as a warning."""
    link: str | None = None
    hint: str = ""
    """What a page shows where the mouse rests."""


@dataclass(frozen=True)
class Table:
    """Rows below ``heads``; without heads, pairs of a name and its value."""

    heads: Sequence[Head]
    rows: Sequence[Sequence[Cell | str]]
    wide: bool = False
    """Whether it has so many columns that they come closer together."""
    sums: bool = False
    """Whether the last row is what the others come to."""

    @property
    def cells(self) -> list[list[tuple[Cell, bool]]]:
        """Each row's cells, and of each whether it is a number's."""
        numbers = [head.number for head in self.heads] or [False, False]
        return [
            [
                (cell if isinstance(cell, Cell) else Cell(cell), number)
                for cell, number in zip(row, numbers, strict=True)
            ]
            for row in self.rows
        ]


@dataclass(frozen=True)
class Line:
    """A paragraph that is softer than others, or a warning, or bold."""

    text: str
    kind: Literal["soft", "warn", "bold"]


@dataclass(frozen=True)
class Folded:
    """What a page shows when its title is clicked: a table, or a text with its line breaks."""

    title: str
    content: Table | str


@dataclass(frozen=True)
class Plot:
    """A finished plot: a caption and an ``<svg>`` element that loads nothing."""

    title: str
    svg: Markup


Part = Table | Line | Folded | str | Sequence[Plot]
"""A part of a page: a string is a paragraph, several plots stand beside each other."""


@dataclass(frozen=True)
class Section:
    """Parts below a title; '' is none. Empty sequences of plots are left out."""

    title: str
    parts: Sequence[Part]


@dataclass(frozen=True)
class Page:
    """A page of HTML: what the browser's tab shows, the heading, a line below it, and sections."""

    title: str
    heading: str
    lead: str
    sections: Sequence[Section]
    command: str | None = None
    """A command line, above the lead."""
    tiles: Sequence[tuple[str, str]] = ()
    """The main figures: value and what it is."""


def pairs(named: Sequence[tuple[str, str]]) -> Table:
    """A table of names and values."""
    return Table((), named)


def environment(found: Mapping[str, Any]) -> Section:
    """The machine and the versions of a report."""
    listed = [
        (figures.label(name), ", ".join(map(str, value)) or "none")
        if isinstance(value, list | tuple)
        else (figures.label(name), figures.figure(name, value))
        for name, value in found.items()
    ]
    return Section("Environment", [pairs(listed)])
