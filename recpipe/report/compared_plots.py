"""Curves of all rows of a comparison in one plot each, from the content of compare.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recpipe.report import figures, plots
from recpipe.report.plots import Axis, Plot, Values
from recpipe.report.quality import FIRST, LABELS, shown_figures
from recpipe.report.remarks import labelled
from recpipe.report.run_plots import SAMPLES, SECONDS, column

LONGEST = 60
"""Characters of a name in a legend, which is then as wide as the plot."""


def legend(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names for curves, which differ even if two rows have the same recipe."""
    lines = (figures.shortened(label.line, LONGEST) for label in labelled(rows))
    return [f"{number}. {line}" for number, line in enumerate(lines, 1)]


def curves(rows: Sequence[Mapping[str, Any]]) -> list[Plot]:
    """Quality and training loss over wall time and over samples, speed over steps; of each row's first
    counted run."""
    names = legend(rows)
    drawn: list[Plot] = []
    histories = [row["history"] for row in rows]
    shown = shown_figures([point for history in histories for point in history])
    first = next((name for name in FIRST if name in shown), "eval_loss")
    drawn += _both(
        f"{LABELS.get(first, 'loss')} on the held-out part",
        names,
        [(column(h, "seconds"), column(h, "samples"), column(h, first)) for h in histories],
    )
    series = [row["series"] for row in rows]
    drawn += _both("Training loss", names, [(s["seconds"], s["samples"], s["loss"]) for s in series])
    if any(s["step"] for s in series):
        speed = {
            name: (s["step"], s["samples_per_second"])
            for name, s in zip(names, series, strict=True)
            if s["step"]
        }
        drawn.append(plots.curves("Speed", speed, Axis("step", "count"), Axis("samples/s", from_zero=True)))
    return drawn


def _both(title: str, names: Sequence[str], values: Sequence[tuple[Values, Values, Values]]) -> list[Plot]:
    """One figure of all rows over seconds and, if it is more than one point of each, over samples;
    ``values``: of each row all three."""
    there = [
        (name, *row) for name, row in zip(names, values, strict=True) if any(y is not None for y in row[2])
    ]
    if not there:
        return []
    time = plots.seconds_axis(SECONDS, [seconds for _, seconds, _, _ in there])
    over_time = {name: (seconds, y) for name, seconds, _, y in there}
    over_samples = {name: (samples, y) for name, _, samples, y in there}
    losses = "loss" in title.lower()
    up = plots.loss_axis("", [y for _, _, _, y in there]) if losses else Axis()
    drawn = [plots.curves(f"{title}, by wall time", over_time, time, up)]
    if any(len(y) > 1 for _, _, _, y in there):
        drawn.append(plots.curves(f"{title}, by samples", over_samples, SAMPLES, up))
    return drawn
