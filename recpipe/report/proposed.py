"""A proposed schema on the terminal: what each column of a sample holds, and what becomes of it."""

from __future__ import annotations

from recpipe.data.proposal.choose import Choice
from recpipe.data.proposal.propose import Proposal
from recpipe.errors import shown
from recpipe.report import terminal
from recpipe.report.page import Cell, Head, Table


def show_proposal(proposal: Proposal) -> None:
    """Print the table, what was read, and what looks suspicious."""
    heads = [
        Head("column", number=False),
        Head("holds", number=False),
        Head("missing"),
        Head("distinct"),
        Head("top 1%"),
        Head("AUC alone", narrow="AUC\nalone"),
        Head("becomes", number=False),
    ]
    rows = [_row(choice, proposal.sample.whole) for choice in proposal.choices]
    lines = [f"Read: {proposal.sample.says}.", *([proposal.found] if proposal.found else [])]
    if not proposal.sample.whole:
        lines.append("Distinct values are those of the sample (+: all rows have more).")
    lines += [
        f"left out: {shown(choice.column.name)}: {choice.reason}"
        for choice in proposal.choices
        if choice.role == "unread" and not choice.suspicions
    ]
    lines += [f"! {line}" for line in proposal.suspicions]
    terminal.show_table(Table(heads, rows), lines)


def _row(choice: Choice, whole: bool) -> list[Cell | str]:
    column, distinct, top = choice.column, "", ""
    if column.content not in ("nothing", "other", "vector"):
        counted = column.counted
        distinct, top = f"{counted.distinct:,}", f"{100 * counted.top:.3g}%"
        distinct += "" if whole else "+"
    return [
        Cell(shown(column.name), bold=choice.role == "label"),
        str(column.type).removeprefix("large_"),
        f"{100 * float(column.missing.mean()):.3g}%" if column.missing.any() else "",
        distinct,
        top,
        "" if choice.alone is None else f"{choice.alone:.3f}",
        Cell(_becomes(choice), bad=bool(choice.suspicions)),
    ]


def _becomes(choice: Choice) -> str:
    """In short."""
    entry = choice.entry
    if choice.role != "feature":
        return {"label": "label", "unread": "left out"}[choice.role]
    words = [entry["kind"], *(entry[key] for key in ("scale",) if key in entry), *entry.get("as", ())]
    if "rows" in entry or "ids" in entry:
        return f"{entry['kind']}, " + (f"{entry['rows']:,} rows" if "rows" in entry else entry["ids"])
    return " ".join(words)
