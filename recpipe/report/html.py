"""Shows a page as one HTML file without external resources."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from recpipe.report.page import Cell, Folded, Line, Page, Table
from recpipe.report.record import replace_file


def write(page: Page, path: Path) -> Path:
    """Write ``path`` atomically and return it."""
    return replace_file(path, render(page))


def render(page: Page) -> str:
    """The page as text."""
    return template().render(page=page)


@cache
def template() -> Template:
    """The one template of all pages: autoescaped; undefined names are errors."""
    jinja = Environment(
        loader=PackageLoader("recpipe.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    for kind in (Cell, Table, Line, Folded):
        jinja.tests[kind.__name__.lower()] = lambda value, kind=kind: isinstance(value, kind)
    return jinja.get_template("page.html.j2")
