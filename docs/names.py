"""Writes the public names into docs/api/*.md, so that these pages say what there is without being built.

    python docs/names.py

Each page has a table between two comments: a line for each name in the module's ``__all__``.
"""

import importlib
import inspect
from enum import Enum
from pathlib import Path
from typing import Any

API = Path(__file__).resolve().parent / "api"
PAGES = {"recpipe": "recpipe", "plugin": "recpipe.plugin", "kit": "recpipe.kit", "testing": "recpipe.testing"}
PAGES |= {
    "serve": "recpipe_serve",
    "low_precision": "recpipe_low_precision",
    "perf_model": "recpipe_perf_model",
}
BEGIN, END = "<!-- names: made by docs/names.py -->", "<!-- end of names -->"


def page(name: str) -> str:
    """The text of ``docs/api/NAME.md`` with its table as it should be."""
    text = (API / f"{name}.md").read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table(PAGES[name])}\n{END}{rest.partition(END)[2]}"


def table(module: str) -> str:
    """The names of a module, each with how it is called and the first paragraph of its docstring."""
    found = importlib.import_module(module)
    names = sorted((name for name in found.__all__ if not name.startswith("_")), key=str.lower)
    rows = [_row(name, getattr(found, name)) for name in names]
    return "\n".join(["| name | what it is |", "|---|---|", *rows, ""])


def _row(name: str, value: Any) -> str:
    own = (inspect.isclass(value) and "numpy" not in repr(value)) or inspect.isroutine(value)
    said = (
        inspect.getdoc(value)
        if own
        else f"`{value!r}`"
        if _is_plain(value)
        else "A type or a constant; described below."
    )
    first = " ".join((said or "").split("\n\n")[0].split()).replace("``", "`")
    return f"| `{name}{_called(value) if own else ''}` | {first.replace('|', chr(92) + '|')} |"


def _is_plain(value: Any) -> bool:
    """Whether Python writes ``value`` alike in all its releases."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, int | str)


def _called(value: Any) -> str:
    """The names of the parameters; empty for enumerations and exceptions."""
    if inspect.isclass(value) and issubclass(value, Enum | BaseException):
        return ""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return ""
    kinds = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return f"({', '.join(kinds.get(p.kind, '') + p.name for p in parameters)})"


if __name__ == "__main__":
    for name in PAGES:
        (API / f"{name}.md").write_text(page(name), encoding="utf-8")
