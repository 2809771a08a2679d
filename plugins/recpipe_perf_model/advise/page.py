"""The advice of ``task=advise``: one screen on the terminal, and advise.html; from advise.json's content."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup
from rich.console import Console

from recpipe.common.console import show
from recpipe.report import figures, html, missed, plots, terminal
from recpipe.report.page import Cell, Head, Line, Page, Part, Plot, Section, Table
from recpipe.report.plots import Axis

_COLUMNS = ("recipe", "predicted\nspeed", "samples/s", "memory", "step\nms", "bound by")
_WORDS = ("recipe", "bound by")
"""Those of them that are no numbers."""
_SHOWN_ROWS = 5
"""How many of a budget's fastest recipes the terminal shows, beside the plain one and those of ``ALWAYS``;
the page has all."""
ALWAYS = ("lru", "lfu")
_POPULAR = 0.01
"""The share of the rows of which the skew is told in a sentence."""
_NEAR = 16
"""Batches of the past whose rows are told."""


def show_advice(told: Mapping[str, Any], page: Path) -> None:
    """Print the advice on one screen, and where the page is."""

    def draw(out: Console) -> None:
        for line in opening(told):
            out.print(line, markup=False, highlight=False)
        for budget in told["budgets"]:
            out.print()
            out.print(budget_title(budget), markup=False, highlight=False, style="bold")
            out.print(terminal.drawn(_table(budget, _shown(budget)), "close"))
            for line in closing(budget):
                out.print(line, markup=False, highlight=False, soft_wrap=line.startswith("  "))
        for line in told["unsure"]:
            out.print(f"Not sure: {line}", markup=False, highlight=False)

    show(draw)
    terminal.print_place(page)


def opening(told: Mapping[str, Any]) -> list[str]:
    """The data, how skewed and how repetitive its ids are, and how fast this machine can train."""
    ids, ranks, speed = told["ids"], told["ranks"], told["all_in_memory"]
    at = min(range(len(ids["shares"])), key=lambda n: abs(ids["shares"][n] - _POPULAR))
    found = [
        f"{ids['batches']:,} batches of {ids['batch_size']:,} samples were read: each looks up "
        f"{figures.short(ids['lookups'] / ids['batches'])} ids, {figures.short(ids['distinct'])} distinct "
        f"rows of {figures.short(ids['rows'])} ({figures.size(ids['bytes'])}).",
        f"Skew: the most popular {100 * ids['shares'][at]:.3g}% of the rows, learnt from the first half, get "
        f"{100 * (1 - ids['hot']['missed'][at]):.1f}% of the second half's lookups.",
    ]
    near = [window for window in ids["windows"] if window["batches"] <= _NEAR]
    if near:
        found.append(
            f"Repetition: {100 * (1 - near[-1]['missed']):.1f}% of lookups are of a row that one of the "
            f"{near[-1]['batches']} batches before looked up, too."
        )
    if ids["never"]:
        names = ", ".join(ids["never"][:4]) + (" ..." if len(ids["never"]) > 4 else "")
        found.append(f"{len(ids['never'])} tables were never looked up: {names}.")
    found.append(f"Machine: {told['machine']['words']}.")
    if ranks["count"] > 1:
        where = "share this machine" if ranks["network"] is None else "are on a machine like it each"
        found.append(f"All speeds are of {ranks['count']} ranks that {where}; memory is that of each.")
    if speed is not None:
        middle, low, high = map(figures.short, speed["samples_per_second"])
        found.append(
            f"With all rows in memory it can train {middle} ({low}..{high}) samples/s; a step takes "
            f"{1e3 * speed['step_seconds'][0]:.3g} ms: {speed['bound_by']}."
        )
    return found


def budget_title(budget: Mapping[str, Any]) -> str:
    """What the rows of a budget have in common."""
    share = 100 * budget["share"]
    return f"With {figures.size(budget['bytes'])} for rows ({share:.3g}% of all)"


def _table(budget: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], because: bool = False) -> Table:
    """Recipes with their predictions, the recommended one bold; ``because``: also why each is as it is."""
    heads = [Head(name.replace("\n", " "), name not in _WORDS, narrow=name) for name in _COLUMNS]
    shown: list[list[Cell | str]] = []
    for row in rows:
        ratio, low, high = row["ratio"]
        digits = 2 if ratio < 9.995 else 1  # three, so that a row fits on 80 columns
        plain = " (plain)" if row["name"] == budget["plain"] else ""
        texts = [
            f"{row['name']}{plain}{' *' if row['alters'] else ''}",
            f"{ratio:.{digits}f} ({low:.1f}..{high:.1f})",
            figures.short(row["samples_per_second"][0]),
            figures.size(row["memory_bytes"]),
            f"{1e3 * row['step_seconds'][0]:.3g}",
            row["bound_by"],
        ]
        shown.append([Cell(text, bold=row["name"] == budget["recommended"]) for text in texts])
        if because:
            altered = f" It alters: {'; '.join(row['alters'])}." if row["alters"] else ""
            shown[-1].append(f"{row['because']}{altered}")
    return Table([*heads, Head("why", number=False)] if because else heads, shown, wide=True)


def _shown(budget: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    always = {budget["plain"], budget["recommended"], *ALWAYS}
    return [row for n, row in enumerate(budget["rows"]) if n < _SHOWN_ROWS or row["name"] in always]


def closing(budget: Mapping[str, Any]) -> list[str]:
    """What to run at a budget and why, what would help, and how the predictions fared."""
    found = []
    rows = {row["name"]: row for row in budget["rows"]}
    if any(row["alters"] for row in _shown(budget)):
        found.append("* It alters what is trained, so it is never recommended for its speed alone.")
    if budget["recommended"] == budget["plain"]:
        found.append("Recommended: the plain recipe; nothing exact is predicted to be faster.")
    else:
        best = rows[budget["recommended"]]
        found.append(f"Recommended: {best['name']}. {best['because']}")
    found.append(f"  {rows[budget['recommended']]['command']}")
    if budget["what_if"]:
        told = "; ".join(f"{each['what']} {each['ratio']:.2f}" for each in budget["what_if"])
        found.append(f"What would make it faster, and how many times: {told}.")
    if budget["left_out"]:
        by_reason: dict[str, list[str]] = {}
        for name, why in budget["left_out"].items():
            by_reason.setdefault(why, []).append(name)
        told = "; ".join(f"{', '.join(names)} ({why})" for why, names in by_reason.items())
        found.append(f"Not predicted: {told}.")
    verified = budget["verified"]
    if verified is not None:
        found.append("Verified, as many times as fast as the plain recipe (predicted, measured, error):")
        for row in verified["rows"]:
            if row["measured"] is None:
                found.append(f"  {row['name']}: {row['failed']}")
                continue
            between = f" ({row['interval'][0]:.2f}..{row['interval'][1]:.2f})" if row["interval"] else ""
            found.append(
                f"  {row['name']}: {row['predicted']:.2f}, {row['measured']:.2f}{between}, "
                f"{100 * row['error']:+.0f}%"
            )
        step = verified["plain_step_ms"]
        found.append(
            f"  The plain recipe's step: {step['predicted']:.3g} ms predicted, {step['measured']:.3g} "
            "measured."
        )
    return found


def write(told: Mapping[str, Any], directory: Path) -> Path:
    """Write ``directory/advise.html`` and return its path."""
    sections = [
        Section("", [*opening(told), *(Line(f"Not sure: {line}", "warn") for line in told["unsure"])])
    ]
    for budget in told["budgets"]:
        lines = [
            Markup("<code>{}</code>").format(line.strip()) if line.startswith("  ") else line
            for line in closing(budget)
        ]
        table = _table(budget, budget["rows"], because=True)
        parts: list[Part] = [table, *lines, list(_budget_plots(budget))]
        sections.append(Section(budget_title(budget), parts))
    sections.append(Section("The ids", [list(missed.drawn(told["ids"]))]))
    lead = "Predicted from the data's ids, the model's operators and measurements of the machine."
    page = Page("recpipe: advice", "recpipe: what would pay", lead, sections)
    return html.write(page, directory / "advise.html")


def _budget_plots(budget: Mapping[str, Any]) -> Iterator[Plot]:
    rows = budget["rows"]
    names = [row["name"] for row in rows]
    spread = [(row["ratio"][1], row["ratio"][2]) for row in rows]
    yield plots.bars(
        "Predicted speed", names, [row["ratio"][0] for row in rows], "times the plain recipe's", spread
    )
    yield plots.bars("Memory", names, [row["memory_bytes"] for row in rows], "rows and buffers", unit="bytes")
    best = next(row for row in rows if row["name"] == budget["recommended"])
    yield plots.spans(f"Steps of {best['name']}", best["timeline"])
    use = best["utilisation"]
    yield plots.bars(
        f"How busy each part is: {best['name']}", list(use), list(use.values()), "of the step", unit="share"
    )
    critical = best["critical"]
    yield plots.bars(
        f"What a step waits for: {best['name']}",
        list(critical),
        list(critical.values()),
        "of a step",
        unit="seconds",
    )
    verified = budget["verified"]
    if verified is not None:
        done = [row for row in verified["rows"] if row["measured"] is not None]
        yield plots.curves(
            "Predicted against measured",
            {row["name"]: ([row["measured"]], [row["predicted"]]) for row in done},
            Axis("measured ratio"),
            Axis("predicted ratio"),
            diagonal="equal",
        )
