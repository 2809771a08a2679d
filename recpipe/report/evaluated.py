"""The figures of a run's latest evaluation with their intervals, groups and slices, for its page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from recpipe.report import figures
from recpipe.report.page import Head, Part, Table, pairs


def evaluated(report: Mapping[str, Any]) -> list[Part]:
    """What ``report["evaluated"]`` tells of each label; empty for reports of earlier versions."""
    told: Mapping[str, Mapping[str, Any]] = report.get("evaluated") or {}
    return [part for label, own in told.items() for part in _parts(label if len(told) > 1 else "", own)]


def _parts(label: str, own: Mapping[str, Any]) -> Iterator[Part]:
    rows = [(figures.title(name), _text(found)) for name, found in own["figures"].items()]
    yield pairs([("label", label), *rows] if label else rows)
    if groups := own.get("groups"):
        count = {name: figures.count(number) for name, number in groups.items()}
        yield (
            f"{count['groups']} groups; {count['one_class']} have one class alone, which GAUC leaves out, "
            f"{count['without_positives']} no positive, which ranking metrics leave out; "
            f"{count['samples_without_group']} samples are in none. Ranks are those among the samples of a "
            "group that were scored, not among all items."
        )
    for part in own.get("slices", ()):
        yield _slices(f"{part['column']} ({label})" if label else part["column"], part["slices"])


def _slices(column: str, slices: list[Mapping[str, Any]]) -> Table:
    names = figures.quality_names(own["figures"] for own in slices)
    heads = [Head(column, number=False), Head("samples"), *(Head(figures.title(name)) for name in names)]
    rows = [
        [
            own["value"],
            figures.count(own["samples"]),
            *(_text(own["figures"].get(name, {"value": None, "low": None})) for name in names),
        ]
        for own in slices
    ]
    return Table(heads, rows, wide=True)


def _text(found: Mapping[str, float | None]) -> str:
    text = figures.decimal(found["value"])
    if found["low"] is None:
        return text
    return f"{text} ({figures.decimal(found['low'])} to {figures.decimal(found['high'])})"
