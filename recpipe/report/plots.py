"""Plots as inline SVG that follows the page's light or dark scheme; drawn by matplotlib without a display."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.figure import Figure
from matplotlib.ticker import (
    EngFormatter,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
)

from recpipe.report import figures
from recpipe.report.page import Plot

# matplotlib writes colours into the SVG. This one is not used elsewhere; it becomes the page's text colour.
_INK = "#010203"
COLOURS = (
    *("#3b82c4", "#d9822b", "#3f9c6b", "#b0527f", "#8a6fc7", "#9b8b3c"),
    *("#4ba3a8", "#c05a4a", "#8b929c", "#5d6fb3", "#a9714b"),
)
_DASHES = ("-", "--", ":")
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
_INCHES = 5.2
"""Width of a plot; text of 10 points is still readable where a phone shows it in 8 cm."""
NAMED = 12
"""Tasks of a timeline that have a colour of their own."""
NAME_WIDTH = 28
"""Characters of a line of a name beside a bar."""
_PITCH, _LINE, _THICKNESS = 0.38, 0.17, 0.24
"""Inches: from bar to bar, more of it for each further line of a name, and of a bar."""
Values = Sequence[float | None]
Unit = Literal["number", "count", "bytes", "seconds", "share"]
"""What an axis shows: counts have whole ticks, bytes and seconds the unit that fits the largest, shares are
in percent."""


@dataclass(frozen=True)
class Axis:
    """An axis of a plot; the unit that fits the values is added to its ``label``."""

    label: str = ""
    unit: Unit = "number"
    log: bool = False
    from_zero: bool = False


@rc_context(_STYLE)
def curves(
    title: str,
    series: Mapping[str, tuple[Values, Values]],
    x: Axis,
    y: Axis,
    diagonal: str = "",
    dots: Collection[str] = (),
) -> Plot:
    """One curve per entry of ``series``, its x and y values; None leaves a gap.

    ``diagonal``: the name of the line where both are equal; '' draws none. ``dots``: entries whose values are
    dots without a line.
    """
    names = list(series) + ([diagonal] if diagonal else [])
    names = names if len(names) > 1 else []
    figure, axes = _canvas(3.0, names)
    scales = [_scale(axis, [part[i] for part in series.values()]) for i, axis in enumerate((x, y))]
    for number, (name, parts) in enumerate(series.items()):
        across, up = (_lengths(part, scale) for part, (scale, _) in zip(parts, scales, strict=True))
        axes.plot(
            across,
            up,
            color=COLOURS[number % len(COLOURS)],
            linestyle="" if name in dots else _DASHES[number // len(COLOURS) % len(_DASHES)],
            linewidth=1.4,
            marker="o" if len(up) <= 24 or name in dots else "",
            markersize=3.5 if len(up) > 1 else 6,
            label=name,
            # Lines at 0% and 100% lie on the axis; half of them would be cut off.
            clip_on="share" not in (x.unit, y.unit),
        )
    if diagonal:
        low, high = (end(axes.get_xlim()[i], axes.get_ylim()[i]) for i, end in ((0, min), (1, max)))
        axes.plot([low, high], [low, high], color=_INK, linewidth=0.8, linestyle="--", label=diagonal)
    _dress(axes, "x", x, scales[0][1])
    _dress(axes, "y", y, scales[1][1])
    return _finish(title, figure, names)


@rc_context(_STYLE)
def histogram(
    title: str,
    edges: Sequence[float],
    counts: Sequence[int],
    x_label: str,
    marks: Mapping[str, float],
) -> Plot:
    """Bars of ``counts`` [n] between ``edges`` [n + 1], on a log axis, with lines at the values of
    ``marks``."""
    figure, axes = _canvas(3.0)
    _dress(axes, "x", Axis(x_label))
    _dress(axes, "y", Axis("steps"))
    widths = [right - left for left, right in pairwise(edges)]
    axes.bar(edges[:-1], counts, width=widths, align="edge", color=COLOURS[0], linewidth=0)
    axes.set_xscale("log")
    _log_ticks(axes.xaxis, edges[0], edges[-1])
    for number, (name, value) in enumerate(marks.items()):
        axes.axvline(value, color=COLOURS[number + 1], linewidth=1.2, label=f"{name} {value:.3g}")
    return _finish(title, figure, list(marks))


@rc_context(_STYLE)
def bars(
    title: str,
    names: Sequence[str],
    values: Values,
    x_label: str,
    spread: Sequence[tuple[float, float]] | None = None,
    from_zero: bool = True,
    unit: Unit = "number",
) -> Plot:
    """Horizontal bars, first name on top, or dots if zero is not a natural start. A name may have several
    lines.

    ``spread``: the lowest and highest value of each name, drawn as a whisker; None draws none.
    """
    figure, axes, thickness = _rows(names)
    rows = list(range(len(names)))
    scale, suffix = _scale(Axis(x_label, unit), [values])
    lengths, colours = _lengths(values, scale), _cycle(len(names))
    if from_zero:
        axes.barh(rows, lengths, color=colours, height=thickness)
    else:
        axes.scatter(lengths, rows, color=colours, s=48, zorder=3)
        # Values that differ by rounding alone must not look different.
        low, high = axes.get_xlim()
        margin = max(0.0, 1e-3 - (high - low)) / 2
        axes.set_xlim(low - margin, high + margin)
    for row, (low, high) in enumerate(spread or ()):
        axes.plot([low, high], [row, row], color=_INK, linewidth=1.6, marker="|", markersize=8)
    _dress(axes, "x", Axis(x_label), suffix)
    return _finish(title, figure)


@rc_context(_STYLE)
def stacked(
    title: str,
    names: Sequence[str],
    parts: Mapping[str, Sequence[float]],
    x_label: str,
    unit: Unit = "number",
) -> Plot:
    """Horizontal bars, first name on top, each the sum of its ``parts`` (by part: a value for each name)."""
    figure, axes, thickness = _rows(names, list(parts))
    scale, suffix = _scale(Axis(x_label, unit), [[sum(each) for each in zip(*parts.values(), strict=True)]])
    left = [0.0] * len(names)
    for colour, (part, values) in zip(_cycle(len(parts)), parts.items(), strict=True):
        lengths = _lengths(values, scale)
        rows = list(range(len(names)))
        axes.barh(rows, lengths, left=left, color=colour, height=thickness, label=part, linewidth=0)
        left = [before + value for before, value in zip(left, lengths, strict=True)]
    _dress(axes, "x", Axis(x_label), suffix)
    return _finish(title, figure, list(parts))


@rc_context(_STYLE)
def spans(title: str, timeline: Sequence[Mapping[str, Any]]) -> Plot:
    """A timeline of tasks, each with its ``place``, ``name``, and ``start`` and ``end`` in seconds: a row for
    each place, and in it a bar for each task. The legend has the ``NAMED`` names that take longest;
    others share a colour."""
    parts = [(task["place"], task["name"], task["start"], task["end"]) for task in timeline]
    places = sorted({place for place, *_ in parts})
    takes: dict[str, float] = {}
    for _, name, start, end in parts:
        takes[name] = takes.get(name, 0.0) + end - start
    named = sorted(takes, key=lambda name: -takes[name])[:NAMED]
    colours = dict(zip(named, _cycle(len(named)), strict=True))
    figure, axes, thickness = _rows(places, named)
    first = min((start for _, _, start, _ in parts), default=0.0)
    scale, unit = figures.time_unit(max((end - first for *_, end in parts), default=0.0))
    for name in (*named, ""):
        mine = [part for part in parts if part[1] == name or not (name or part[1] in colours)]
        axes.barh(
            [places.index(place) for place, *_ in mine],
            [(end - start) / scale for _, _, start, end in mine],
            left=[(start - first) / scale for _, _, start, _ in mine],
            color=colours.get(name, _INK),
            height=thickness,
            label=name or None,
            linewidth=0,
        )
    _dress(axes, "x", Axis("time"), unit)
    return _finish(title, figure, named)


def _canvas(height: float, legend: Sequence[str] = ()) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_INCHES, height + 0.2 * _legend_size(legend)[1]), layout="constrained")
    axes = figure.subplots()
    axes.set_axisbelow(True)
    return figure, axes


def _rows(names: Sequence[str], legend: Sequence[str] = ()) -> tuple[Figure, Axes, float]:
    """A canvas with ``names`` at its rows, the first on top; long lines are cut in the middle. And the
    thickness of a row's bar."""
    # Names of several lines do not touch.
    pitch = _PITCH + _LINE * max((name.count("\n") for name in names), default=0)
    figure, axes = _canvas(0.9 + pitch * len(names), legend)
    axes.grid(axis="y", visible=False)
    shown = ["\n".join(figures.shortened(line, NAME_WIDTH) for line in name.split("\n")) for name in names]
    axes.set_yticks(range(len(names)), shown)
    axes.set_ylim(len(names) - 0.4, -0.6)
    return figure, axes, _THICKNESS / pitch


def seconds_axis(label: str, values: Sequence[Values]) -> Axis:
    """An axis of seconds that begins at 0, unless all ``values`` are far from it, as in a resumed run."""
    known = [value for part in values for value in part if value is not None]
    return Axis(label, "seconds", from_zero=bool(known) and 2 * min(known) <= max(known))


def loss_axis(label: str, values: Sequence[Values]) -> Axis:
    """An axis of losses: logarithmic where the first ones are so large that the others would look equal."""
    known = sorted(value for part in values for value in part if value is not None and math.isfinite(value))
    return Axis(label, log=bool(known) and known[0] > 0 and known[-1] > 4 * known[len(known) // 2])


def _scale(axis: Axis, values: Sequence[Values]) -> tuple[float, str]:
    """What to divide the values by, and the unit that they then have."""
    largest = max((abs(v) for part in values for v in part if v is not None), default=0.0)
    if axis.unit == "bytes":
        return figures.byte_unit(largest)
    return figures.time_unit(largest) if axis.unit == "seconds" else (1.0, "")


def _dress(axes: Axes, which: Literal["x", "y"], axis: Axis, unit: str = "") -> None:
    """Label, ticks and limits."""
    along = axes.xaxis if which == "x" else axes.yaxis
    if axis.log:
        axes.set_xscale("log") if which == "x" else axes.set_yscale("log")
        _log_ticks(along, *along.get_view_interval(), share=axis.unit == "share")
    elif axis.unit == "share":
        along.set_major_formatter(FuncFormatter(_percent))
    else:
        along.set_major_formatter(FuncFormatter(_tick))
        if axis.unit == "count":
            along.set_major_locator(MaxNLocator("auto", integer=True))
    along.set_label_text(", ".join(part for part in (axis.label, unit) if part))
    if axis.unit == "share":
        low, high = along.get_view_interval()
        ends = (0.0, 1.0) if axis.from_zero else (low if axis.log else max(0.0, low), min(1.0, high))
        axes.set_xlim(*ends) if which == "x" else axes.set_ylim(*ends)
    elif axis.from_zero and which == "x":
        axes.set_xlim(left=0)
    elif axis.from_zero:
        axes.set_ylim(bottom=0, top=max(1.04 * axes.get_ylim()[1], 1e-12))


def _log_ticks(along: XAxis | YAxis, low: float, high: float, share: bool = False) -> None:
    """Labels 1, 2, 5, 10 .. on a log axis of less than three decades, else 1, 10, 100 .."""
    subs = (1.0, 2.0, 5.0) if high < 1000 * low else (1.0,)
    along.set_major_locator(LogLocator(subs=subs, numticks=12 if len(subs) > 1 else 6))
    along.set_major_formatter(FuncFormatter(_percent if share else _tick))
    along.set_minor_formatter(NullFormatter())


def _percent(value: float, _position: int) -> str:
    """A label such as 25% or 0.00001%, never 1e-05%."""
    text = f"{100 * value:.10f}" if 0 < abs(value) < 1e-5 else f"{100 * value:g}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text}%"


def _tick(value: float, _position: int) -> str:
    """A label such as 200k (not 0.2 with 1e6 at the end of the axis) or 0.77 (not 770m)."""
    return EngFormatter(sep="")(value) if abs(value) >= 1000 else f"{value:g}"


def _legend_size(names: Sequence[str]) -> tuple[int, int]:
    """Columns of a legend that is not wider than the plot, and its lines."""
    longest = max((len(name) for name in names), default=1)
    columns = max(1, min(3, 72 // (longest + 8)))
    return columns, -(-len(names) // columns)


def _finish(title: str, figure: Figure, legend: Sequence[str] = ()) -> Plot:
    """The drawing as a plot, with the names of ``legend`` below it."""
    if legend:
        figure.legend(
            loc="outside lower center",
            ncols=_legend_size(legend)[0],
            frameon=False,
            fontsize=8.5,
            columnspacing=1.2,
        )
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


def _lengths(values: Values, scale: float) -> list[float]:
    return [math.nan if value is None else value / scale for value in values]


def _cycle(count: int) -> list[str]:
    return [COLOURS[index % len(COLOURS)] for index in range(count)]
