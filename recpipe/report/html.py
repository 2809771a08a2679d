"""report.html: one file without external resources, made only from the content of report.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from omegaconf import OmegaConf

from recpipe.common.meter import counting
from recpipe.report import figures, folding, measured, plots, run_plots
from recpipe.report.quality import FIRST, LABELS, VERDICT, Figures, labelled, shown_figures
from recpipe.report.record import replace_file


@counting("writing the report")
def write(report: Mapping[str, Any], directory: Path) -> Path:
    """Write ``directory/report.html`` for ``report`` (report.json's content) and return its path."""
    return replace_file(directory / "report.html", render(report))


def render(report: Mapping[str, Any]) -> str:
    """The page as text; ``report`` is what ``RunReport.to_dict`` gives."""
    return page("report.html.j2").render(
        report=report,
        title=_title(report),
        quality=[(_TILES.get(label, label), value) for label, value in labelled(report["quality"])],
        warnings=_warnings(report),
        learning=run_plots.learning(report) + run_plots.calibration(report),
        speed=run_plots.speed(report),
        cold=run_plots.cold_tier(report) + run_plots.skew(report),
        memory=run_plots.memory(report),
        tables=folding.folded(report["memory"]["tables"], folding.LARGEST),
        summary=folding.summary(report["memory"]["tables"]),
        shards=folding.shards((report["assembly"].get("shards") or {}).get("tables", {})),
        profile=_profile(report.get("profile")),
        plugins={name: _plugin(values) for name, values in report["plugins"].items()},
        recipe=OmegaConf.to_yaml(OmegaConf.create(dict(report["recipe"]))),
        assembly=_assembly(report["assembly"]),
    )


def _title(report: Mapping[str, Any]) -> str:
    """The run's model, data and plugins."""
    data = report["recipe"].get("data", {}).get("name", "")
    data = "batches given from Python" if data == "given" else data or "data"
    plugins = " + ".join(report["plugins"])
    return f"{report['model'] or 'A model'} on {data}{f' with {plugins}' if plugins else ''}"


def _assembly(described: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Keys and values of the assembly without its shards, with the plugins' parts where plugins are named;
    the keys without a value are one row."""
    parts = described.get("parts", {})
    slots = {slot: part for slot, part in parts.items() if isinstance(part, str)}
    claims = {claim: decided for claim, decided in parts.items() if claim not in slots}
    told = {**described, **slots, "codecs": claims.pop("codecs", {}), "tables": claims}
    rows = folding.flat({key: value for key, value in told.items() if key not in ("shards", "parts")})
    empty = ", ".join(name for name, value in rows if value == "-")
    return [row for row in rows if row[1] != "-"] + ([("nobody's", empty)] if empty else [])


def _warnings(report: Mapping[str, Any]) -> list[str]:
    profile = report.get("profile") or {}
    disturbed = (
        figures.disturbed(report["throughput"]["others_cpu_share"], "training"),
        figures.disturbed(profile.get("others_cpu_share"), "the measurement of its limits"),
    )
    found = [
        f"{warning[0].upper()}{warning[1:]}: speeds and floors are those of a shared machine."
        for warning in disturbed
        if warning
    ]
    if report["io"]["cold_start"]:
        found.append("Cold start only: the cache was never full in this run.")
    found += [f"Figures are missing: {fault}" for fault in (report.get("unreported") or {}).values()]
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
        "predicted": measured.predicted(section),
        "predicted_columns": measured.PREDICTED,
        "predicted_rows": measured.predicted_rows(section),
        "predicted_plots": measured.predicted_plots(section),
    }


def _plugin(values: Mapping[str, Any]) -> dict[str, Any]:
    """A plugin's verdict, its scalars as table rows and its lists as curves."""
    verdict = values.get(VERDICT)
    values = {name: value for name, value in values.items() if name != VERDICT}
    scalars = {name: value for name, value in values.items() if not isinstance(value, list | dict)}
    curves = [
        _curve(name, value) for name, value in values.items() if isinstance(value, list) and _drawable(value)
    ]
    texts = {
        name: value
        for name, value in values.items()
        if isinstance(value, dict) or (isinstance(value, list) and not _drawable(value))
    }
    return {"verdict": verdict, "scalars": scalars | texts, "plots": curves}


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
