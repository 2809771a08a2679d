"""report.html: one file without external resources, made only from the content of report.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from omegaconf import OmegaConf

from recpipe.report import figures, measured, plots
from recpipe.report.quality import FIRST, LABELS, Figures, labelled, shown_figures
from recpipe.report.record import replace_file


def write(report: Mapping[str, Any], directory: Path) -> Path:
    """Write ``directory/report.html`` for ``report`` (report.json's content) and return its path."""
    return replace_file(directory / "report.html", render(report))


def render(report: Mapping[str, Any]) -> str:
    """The page as text; ``report`` is what ``RunReport.to_dict`` gives."""
    return page("report.html.j2").render(
        report=report,
        quality=[(_TILES.get(label, label), value) for label, value in labelled(report["quality"])],
        warnings=_warnings(report),
        learning=_learning(report["history"]),
        speed=_speed(report),
        profile=_profile(report.get("profile")),
        plugins={name: _plugin(values) for name, values in report["plugins"].items()},
        recipe=OmegaConf.to_yaml(OmegaConf.create(dict(report["recipe"]))),
        assembly=_flat(report["assembly"]),
    )


def _warnings(report: Mapping[str, Any]) -> list[str]:
    profile = report.get("profile") or {}
    disturbed = (
        figures.disturbed(report["throughput"]["others_cpu_share"], "training"),
        figures.disturbed(profile.get("others_cpu_share"), "the measurement of its limits"),
    )
    found = [
        f"{warning}: speeds and floors are those of a shared machine." for warning in disturbed if warning
    ]
    if report["io"]["cold_start"]:
        found.append("Cold start only: the cache was never full in this run.")
    return found


_TILES = {"AUC": "AUC, held out", "logloss": "logloss (nats)", "NE": "normalized entropy"}
"""Longer labels for figures of quality."""


def page(template: str) -> Template:
    """A template of this package: autoescaped, undefined names are errors, formatters as filters."""
    return _templates().get_template(template)


@cache
def _templates() -> Environment:
    jinja = Environment(
        loader=PackageLoader("recpipe.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    for formatter in (
        figures.count,
        figures.size,
        figures.decimal,
        figures.signed,
        figures.scientific,
        figures.interval,
        figures.label,
    ):
        jinja.filters[formatter.__name__] = formatter
    jinja.globals["figure"] = figures.figure
    return jinja


def quality_bars(names: Sequence[str], several: Sequence[Figures]) -> list[plots.Plot]:
    """Plots of the main figures of quality of ``several`` runs with these ``names``, or of the loss; empty if
    no run has them."""
    found = shown_figures(several)
    drawn = []
    for key in [key for key in FIRST if key in found] or ["loss"]:
        values = [figures.get(key) for figures in several]
        if any(value is not None for value in values):
            title = f"{LABELS[key]} on the held-out part"
            drawn.append(plots.bars(title, names, values, LABELS[key], from_zero=False))
    return drawn


def _learning(history: list[dict[str, Any]]) -> list[plots.Plot]:
    if not history:
        return []
    samples = [point["samples"] for point in history]

    def column(name: str) -> list[float | None]:
        return [point[name] for point in history]

    names = shown_figures(history)
    first = next((name for name in FIRST if name in names), "")
    if "logloss" in names:
        held_out, unit = {"evaluation logloss": column("logloss")}, "nats"
    else:
        held_out, unit = {"evaluation loss": column("eval_loss")}, ""
    drawn = [
        plots.lines("Loss", samples, held_out | {"training loss": column("loss")}, "samples trained", unit)
    ]
    if first:
        title = f"{LABELS[first]} on the held-out part"
        drawn.insert(0, plots.lines(title, samples, {LABELS[first]: column(first)}, "samples trained"))
    return drawn


def _speed(report: Mapping[str, Any]) -> list[plots.Plot]:
    drawn = []
    if history := report["history"]:
        speed = {"speed": [point["samples_per_second"] for point in history]}
        samples = [point["samples"] for point in history]
        drawn.append(plots.lines("Training speed", samples, speed, "samples trained", "samples/s", True))
    steps = report["throughput"]["step_histogram"]
    if steps["counts"]:
        title = "Step time (last bar: the slowest 1%)"
        drawn.append(plots.histogram(title, steps["edges_ms"], steps["counts"], "ms per step"))
    return drawn


def _profile(section: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The template's values for the report's ``profile``."""
    if section is None:
        return None
    return {
        "plots": measured.phase_bars(section),
        "columns": measured.COLUMNS,
        "rows": measured.rows(section),
        "limits": measured.limits(section),
        "profiled": measured.profiled(section),
    }


def _plugin(values: Mapping[str, Any]) -> dict[str, Any]:
    """A plugin's scalars as table rows and its lists as curves."""
    scalars = {name: value for name, value in values.items() if not isinstance(value, list | dict)}
    curves = [
        _curve(name, value) for name, value in values.items() if isinstance(value, list) and _drawable(value)
    ]
    texts = {
        name: value
        for name, value in values.items()
        if isinstance(value, dict) or (isinstance(value, list) and not _drawable(value))
    }
    return {"scalars": scalars | texts, "plots": curves}


def _drawable(values: list[Any]) -> bool:
    def number(value: Any) -> bool:
        return value is None or (isinstance(value, int | float) and not isinstance(value, bool))

    def pair(value: Any) -> bool:
        return isinstance(value, list) and len(value) == 2 and all(map(number, value))

    return bool(values) and (all(map(number, values)) or all(map(pair, values)))


def _curve(name: str, values: list[Any]) -> plots.Plot:
    pairs = values if isinstance(values[0], list) else [[index, value] for index, value in enumerate(values)]
    title = figures.label(name)
    return plots.lines(title, [x for x, _ in pairs], {title: [y for _, y in pairs]}, "")


def _flat(tree: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Nested assembly as (dotted key, value) rows; lists of scalars stay on one row."""
    if isinstance(tree, Mapping) and tree:
        return [
            row
            for key, item in tree.items()
            for row in _flat(item, f"{prefix}.{key}" if prefix else str(key))
        ]
    if isinstance(tree, list) and any(isinstance(item, Mapping | list) for item in tree):
        return [row for index, item in enumerate(tree) for row in _flat(item, f"{prefix}[{index}]")]
    if isinstance(tree, list):
        return [(prefix, ", ".join(map(str, tree)) or "-")]
    return [(prefix, "-" if tree in (None, {}, "") else str(tree))] if prefix else []
