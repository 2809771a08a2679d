"""Plots as inline SVG that follows the page's light or dark scheme; drawn by matplotlib without a display."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter

# matplotlib writes colours into the SVG. This one is not used elsewhere; it becomes the page's text colour.
_INK = "#010203"
COLOURS = (
    *("#3b82c4", "#d9822b", "#3f9c6b", "#b0527f", "#8a6fc7", "#9b8b3c"),
    *("#4ba3a8", "#c05a4a", "#8b929c", "#5d6fb3", "#a9714b"),
)
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "recpipe",
    "text.parse_math": False,
    "font.size": 10,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.grid": True,
    "grid.color": _INK,
    "grid.alpha": 0.12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
}


@dataclass(frozen=True)
class Plot:
    """A finished plot: a caption and an ``<svg>`` element that loads nothing."""

    title: str
    svg: Markup


def lines(
    title: str,
    x: Sequence[float | None],
    series: Mapping[str, Sequence[float | None]],
    x_label: str,
    y_label: str = "",
    from_zero: bool = False,
) -> Plot:
    """One curve per entry of ``series`` over ``x``; None leaves a gap."""
    with rc_context(_STYLE):
        figure, axes = _canvas(x_label, y_label)
        for colour, (name, values) in zip(_cycle(len(series)), series.items(), strict=True):
            marker = "o" if len(values) <= 60 else ""
            axes.plot(_floats(x), _floats(values), color=colour, marker=marker, markersize=3.5, label=name)
        if from_zero:
            axes.set_ylim(bottom=0)
        if len(series) > 1:
            figure.legend(loc="outside lower center", ncols=3, frameon=False)
        return _finish(title, figure)


def histogram(title: str, edges: Sequence[float], counts: Sequence[int], x_label: str) -> Plot:
    """Bars of ``counts`` [n] between ``edges`` [n + 1]."""
    with rc_context(_STYLE):
        figure, axes = _canvas(x_label, "steps")
        widths = [right - left for left, right in pairwise(edges)]
        axes.bar(edges[:-1], counts, width=widths, align="edge", color=COLOURS[0], linewidth=0)
        return _finish(title, figure)


def bars(
    title: str,
    names: Sequence[str],
    values: Sequence[float | None],
    x_label: str,
    spread: Sequence[tuple[float, float]] | None = None,
    from_zero: bool = True,
) -> Plot:
    """Horizontal bars, first name on top, or dots if zero is not a natural start.

    ``spread``: the lowest and highest value of each name, drawn as a whisker; None draws none.
    """
    with rc_context(_STYLE):
        figure, axes = _canvas(x_label, "", height=0.9 + 0.38 * len(names))
        rows = list(range(len(names)))
        lengths = _floats(values)
        if from_zero:
            axes.barh(rows, lengths, color=_cycle(len(names)), height=0.62)
        else:
            axes.scatter(lengths, rows, color=_cycle(len(names)), s=48, zorder=3)
            # Values that differ by rounding alone must not look different.
            low, high = axes.get_xlim()
            margin = max(0.0, 1e-3 - (high - low)) / 2
            axes.set_xlim(low - margin, high + margin)
        if spread is not None:
            for row, (low, high) in zip(rows, spread, strict=True):
                axes.plot([low, high], [row, row], color=_INK, linewidth=1.6, marker="|", markersize=8)
        axes.grid(axis="y", visible=False)
        axes.set_yticks(rows, names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        return _finish(title, figure)


def stacked(title: str, names: Sequence[str], parts: Mapping[str, Sequence[float]], x_label: str) -> Plot:
    """Horizontal bars, first name on top, each the sum of its ``parts`` (by part: a value for each name)."""
    with rc_context(_STYLE):
        figure, axes = _canvas(x_label, "", height=1.6 + 0.5 * len(names))
        rows = list(range(len(names)))
        left = [0.0] * len(names)
        for colour, (part, values) in zip(_cycle(len(parts)), parts.items(), strict=True):
            axes.barh(rows, values, left=left, color=colour, height=0.62, label=part, linewidth=0)
            left = [before + value for before, value in zip(left, values, strict=True)]
        axes.grid(axis="y", visible=False)
        axes.set_yticks(rows, names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8.5, columnspacing=1.2)
        return _finish(title, figure)


def _canvas(x_label: str, y_label: str, height: float = 3.0) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.4, height), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x_label)
    axes.xaxis.set_major_formatter(FuncFormatter(_tick))
    axes.set_axisbelow(True)
    axes.set_ylabel(y_label)
    return figure, axes


def _tick(value: float, _position: int) -> str:
    """A label such as 200k (not 0.2 with 1e6 at the end of the axis) or 0.77 (not 770m)."""
    return EngFormatter(sep="")(value) if abs(value) >= 1000 else f"{value:g}"


def _finish(title: str, figure: Figure) -> Plot:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # matplotlib has escaped the text already; the font is the page's.
    svg = (
        svg.replace(_INK, "currentColor")
        .replace("'DejaVu Sans'", "inherit")
        .replace("<svg", '<svg role="img"', 1)
    )
    return Plot(title, Markup(svg))


def _floats(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else float(value) for value in values]


def _cycle(count: int) -> list[str]:
    return [COLOURS[index % len(COLOURS)] for index in range(count)]
