"""Writes the tables of measured results into the pages, from the data in ``benchmarks/results/*.json``.

    python docs/tables.py

A page shows ``benchmarks/results/NAME.json`` between ``<!-- result: NAME -->`` and
``<!-- end of result -->``, or of its rows those that begin with WORDS, by ``<!-- result: NAME: WORDS -->``.
Results that no page shows whole stand in ``docs/results.md``, which is written as a whole. A data file has

``title``     what was measured, in a few words
``command``   what measures it again
``machine``   where it was measured; ``commit`` (may be empty) and ``date``: what, and when
``kept``      what the values are: each round, or what is left of the rounds
``columns``   {heading: format}: a Python format such as ``{:,.0f}``; null for a column of words
``rows``      a list of cells for each row: a number, [median, lowest, highest], {"rounds": [...]}, words, or
              null for an empty cell
"""

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
REST = ROOT / "docs" / "results.md"
BLOCK = re.compile(r"(<!-- result: (\w+)(?:: ([^>]+))? -->\n).*?(<!-- end of result -->)", re.DOTALL)
TOP = """# Results in full

Tables too long for the pages that tell what follows from them; the way in is [Benchmarks](benchmarks.md).
`python docs/tables.py` writes this page from [`benchmarks/results/`](../benchmarks/results/README.md).
"""


def pages() -> dict[Path, str]:
    """Every page that shows results, with its text as it should be."""
    results = {file.stem: json.loads(file.read_text("utf-8")) for file in sorted(RESULTS.glob("*.json"))}
    written: dict[Path, str] = {}
    rest = dict(results)
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("plugins/*/README.md")]:
        text = page.read_text(encoding="utf-8")
        for begin, name, words, end in BLOCK.findall(text):
            block = begin + table(name, results[name], page, words) + end
            text = re.sub(rf"{re.escape(begin)}.*?{end}", lambda _, block=block: block, text, flags=re.DOTALL)
            if not words:
                rest.pop(name, None)
            written[page] = text
    sections = [f"## {result['title']}\n\n{table(name, result, REST)}" for name, result in rest.items()]
    return {**written, REST: "\n".join([TOP, *sections])}


def table(name: str, result: dict[str, Any], page: Path, words: str = "") -> str:
    """The table of one result, and a line that says how, where and when it was measured; with ``words`` of
    the rows alone that begin with these."""
    rows = [row for row in result["rows"] if words in ("", row[0])]
    if not rows:
        return f"No row yet in: {result['title']}.\n"
    formats = result["columns"].values()
    lines = [
        result["columns"],
        ["--:" if format else "---" for format in formats],
        *([cell(value, format) for value, format in zip(row, formats, strict=True)] for row in rows),
    ]
    commit = f"commit {result['commit']}; " if result["commit"] else ""
    file = os.path.relpath(RESULTS / f"{name}.json", page.parent)
    made = f"`{result['command']}`: {result['machine']}; {commit}{result['date']}."
    kept = f"[Data]({file}): {result['kept']}."
    return "\n".join([*map(_line, lines), "", f"{made} {kept}", ""])


def cell(value: Any, format: str | None) -> str:
    """A value as its column shows it."""
    if value is None:
        return ""
    if isinstance(value, str) or format is None:
        return str(value)
    if isinstance(value, dict):
        return " ".join(map(format.format, value["rounds"]))
    if isinstance(value, list):
        return "{} ({}..{})".format(*map(format.format, value))
    return format.format(value)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")
