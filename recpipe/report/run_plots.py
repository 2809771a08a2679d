"""The plots of a run's page that core makes, from the content of report.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recpipe.report import figures, plots
from recpipe.report.figures import FIRST, Figures, shown_figures
from recpipe.report.page import Plot
from recpipe.report.plots import Axis, Values

SAMPLES = Axis("samples trained")
SECONDS = "since the process's start, evaluation apart"
LARGEST = 8
"""How many tables have a line of their own in a report."""


def learning(report: Mapping[str, Any]) -> list[Plot]:
    """The main figure of quality and the loss, each over samples and over time; what was found once is no
    curve."""
    history: Sequence[Mapping[str, Any]] = report["history"]
    if not history:
        return []
    names = shown_figures(history)
    first = next((name for name in FIRST if name in names), "")
    over: list[tuple[str, Values, Axis]] = [("samples", column(history, "samples"), SAMPLES)]
    seconds = column(history, "seconds")
    if any(value is not None for value in seconds):  # unknown after a checkpoint of an older version
        over.append(("wall time", seconds, plots.seconds_axis(SECONDS, [seconds])))
    drawn = []
    if first and len(history) > 1:
        name = figures.title(first)
        title = f"{name} on the held-out part"
        drawn += [
            plots.curves(f"{title}, by {how}", {name: (x, column(history, first))}, axis, Axis())
            for how, x, axis in over
        ]
    held_out, unit = ("logloss", "nats") if "logloss" in names else ("eval_loss", "")
    training = report["series"]
    for how, x, axis in over:
        each = {
            f"evaluation {'logloss' if unit else 'loss'}": (x, column(history, held_out)),
            "training loss": (training["samples" if axis is SAMPLES else "seconds"], training["loss"]),
        }
        each = {name: curve for name, curve in each.items() if len(curve[0]) > 1}
        if each:
            losses = plots.loss_axis(unit, [values for _, values in each.values()])
            drawn.append(plots.curves(f"Loss, by {how}", each, axis, losses))
    return drawn + rates(history)


def rates(history: Sequence[Mapping[str, Any]]) -> list[Plot]:
    """The learning rates in force at the evaluations, over steps; none where no rate has a schedule."""
    points = [point for point in history if point.get("learning_rates")]
    if len(points) < 2:
        return []
    steps, found = column(points, "step"), [point["learning_rates"] for point in points]
    each = {name: (steps, column(found, name)) for name in found[0]}
    return [plots.curves("Learning rates, by steps", each, Axis("steps"), Axis())]


def progressive(report: Mapping[str, Any]) -> list[Plot]:
    """The figures of progressive validation that draw a learning curve, over samples."""
    windows: Sequence[Mapping[str, Any]] = report.get("progressive", ())
    if len(windows) < 2:
        return []
    samples, qualities = column(windows, "samples"), [window["quality"] for window in windows]
    return [
        plots.curves(
            f"{figures.title(name)} of samples before they are trained",
            {figures.title(name): (samples, column(qualities, name))},
            SAMPLES,
            Axis(),
        )
        for name in shown_figures(qualities)
    ]


def column(history: Sequence[Mapping[str, Any]], name: str) -> list[float | None]:
    """One figure of every point of a learning curve."""
    return [point.get(name) for point in history]


def calibration(report: Mapping[str, Any]) -> list[Plot]:
    """The observed click rate over the predicted one, by bins of the held-out samples."""
    found = report["calibration"]
    if found is None:
        return []
    samples = figures.count(sum(found["samples"]))
    each = {"bins of predictions": (found["predicted"], found["observed"])}
    return [
        plots.curves(
            f"Calibration: {samples} held-out samples in {len(found['samples'])} bins",
            each,
            Axis("predicted rate", "share"),
            Axis("observed rate", "share"),
            diagonal="perfectly calibrated",
        )
    ]


def speed(report: Mapping[str, Any]) -> list[Plot]:
    """Speed over steps, and the times of steps."""
    drawn = []
    series, throughput = report["series"], report["throughput"]
    if series["step"]:
        each = {"speed": (series["step"], series["samples_per_second"])}
        drawn.append(
            plots.curves("Training speed", each, Axis("step", "count"), Axis("samples/s", from_zero=True))
        )
    steps = throughput["step_histogram"]
    if steps["counts"]:
        marks = {name: throughput["step_ms"][name] for name in ("p50", "p90", "p99")}
        title = "Step times"
        drawn.append(plots.histogram(title, steps["edges_ms"], steps["counts"], "ms per step", marks))
    return drawn


def cold_tier(report: Mapping[str, Any]) -> list[Plot]:
    """Hit rate and cold traffic over steps."""
    series, drawn = report["series"], []
    of_rank = " of rank 0" if report["ranks"]["world"] > 1 else ""
    if series["lookups"]:
        rate = [
            hits / lookups if lookups else None
            for hits, lookups in zip(series["hits"], series["lookups"], strict=True)
        ]
        each = {"hit rate": (series["step"], rate)}
        title = f"Hit rate{of_rank}: lookups whose row was resident"
        drawn.append(plots.curves(title, each, Axis("step", "count"), Axis("", "share", from_zero=True)))
    if any(series["bytes_read"]) or any(series["bytes_written"]):
        moved = {
            name: (
                series["step"],
                [b / n for b, n in zip(series[f"bytes_{name}"], series["steps"], strict=True)],
            )
            for name in ("read", "written")
        }
        title = f"Cold tier{of_rank}: bytes per step"
        drawn.append(plots.curves(title, moved, Axis("step", "count"), Axis("", "bytes", from_zero=True)))
    return drawn


def skew(report: Mapping[str, Any]) -> list[Plot]:
    """The share of lookups over the share of rows, the most popular first."""
    found = report["skew"]
    if found is None or not found["tables"]:
        return []
    each = {
        f"{figures.shortened(table['name'] or 'all tables')} ({figures.short(table['rows'])} rows)": (
            table["share_of_rows"],
            table["share_of_lookups"],
        )
        for table in found["tables"]
    }
    title = f"Access skew, from {figures.count(found['lookups'])} lookups of {found['batches']} batches"
    rows = Axis("most popular rows", "share", log=True)
    return [plots.curves(title, each, rows, Axis("lookups", "share", from_zero=True))]


def folded(tables: Sequence[Mapping[str, Any]], largest: int) -> list[dict[str, Any]]:
    """The ``largest`` of ``memory.tables`` by bytes, largest first, and the others in one line if they are
    several; rows and dims are texts. What is not known of one table is None for all that share its line."""
    ordered = sorted(tables, key=lambda table: -(table["weight_bytes"] + table["state_bytes"]))
    if len(ordered) <= largest + 1:
        largest = len(ordered)
    parts = [(str(table["name"]), [table]) for table in ordered[:largest]]
    if rest := ordered[largest:]:
        parts.append((f"{len(rest)} smaller tables", rest))
    lines = []
    for name, together in parts:
        line: dict[str, Any] = {"name": name}
        for key in ("weight_bytes", "state_bytes", "resident_rows", "resident_bytes", "cold_bytes"):
            values = [table[key] for table in together]
            line[key] = None if None in values else sum(values)
        for key in ("rows", "dim"):
            line[key] = span([table[key] for table in together])
        line["sharding"] = ", ".join(dict.fromkeys(each["sharding"] for each in together if each["sharding"]))
        lines.append(line)
    return lines


def span(values: Sequence[float]) -> str:
    """``3 to 200,000``, or the one value."""
    low, high = figures.count(min(values)), figures.count(max(values))
    return low if low == high else f"{low} to {high}"


def memory(report: Mapping[str, Any]) -> list[Plot]:
    """Bytes of the largest tables, by tier."""
    lines = folded(report["memory"]["tables"], LARGEST)
    tiers = {tier: [line[f"{tier}_bytes"] or 0 for line in lines] for tier in ("resident", "cold")}
    parts: dict[str, list[float]] = {tier: values for tier, values in tiers.items() if any(values)}
    names = [line["name"] for line in lines]
    if lines and (overhead := report["memory"]["tier_overhead_bytes"]):
        names.append("beside them")
        parts = {name: [*values, 0.0] for name, values in parts.items()}
        parts["row maps, policy, slab, buffers"] = [*[0.0] * len(lines), overhead]
    return [plots.stacked("Memory by table and tier", names, parts, "", "bytes")] if parts else []


def quality_bars(names: Sequence[str], several: Sequence[Figures]) -> list[Plot]:
    """Plots of the main figures of quality of ``several`` runs with these ``names``, or of the loss; empty if
    no run has them."""
    found = shown_figures(several)
    drawn = []
    for key in [key for key in FIRST if key in found] or ["loss"]:
        values, name = [own.get(key) for own in several], figures.title(key)
        if any(value is not None for value in values):
            drawn.append(plots.bars(f"{name} on the held-out part", names, values, name, from_zero=False))
    return drawn
