"""The report of a quantization: report.json, report.html and a table on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from recpipe.kit import Axis, Section, curves, environment, measured_page, readable_bytes, replace_file, write_json
from recpipe_low_precision.judge import Evaluation
from recpipe_low_precision.search import Found

SCHEMA = 1
_PERCENT = 100


def content(
    tables: Mapping[str, Mapping[str, Any]],
    quality: Mapping[str, Any],
    lookups: Mapping[str, Any] | None,
    found: Found,
    evaluations: Sequence[Evaluation],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """report.json's content. ``tables``: type, rows, dim and bytes of each; ``quality``: figures of the test
    slice."""
    before = sum(table["float32_bytes"] for table in tables.values())
    after = sum(table["bytes"] for table in tables.values())
    chosen = found.evaluation
    return {
        "schema": SCHEMA,
        "task": "quantize",
        "settings": dict(settings),
        "bytes": {"float32": before, "quantized": after, "ratio": before / after},
        "tables": {name: dict(table) for name, table in tables.items()},
        "calibration": None if chosen is None else {k: v for k, v in asdict(chosen).items() if k != "types"},
        "test": dict(quality),
        "lookups": lookups,
        "search": {
            "ended": found.ended,
            "evaluations": len(evaluations),
            "accepted": len(found.accepted),
            "points": [[e.bytes, e.ne, e.step] for e in evaluations],
        },
        "environment": environment(),
    }


def write(directory: Path, report: Mapping[str, Any]) -> None:
    """Write report.json and report.html."""
    write_json(directory / "report.json", report)
    replace_file(directory / "report.html", page(report))


def page(report: Mapping[str, Any]) -> str:
    """report.html's text."""
    size, test = report["bytes"], report["test"]
    lead = (
        f"Tables of {readable_bytes(size['float32'])} in {readable_bytes(size['quantized'])}, "
        f"{size['ratio']:.2f} times fewer. On the test slice of {test['samples']:,} samples normalized entropy "
        f"changes by {_share(test['ne_difference'])}."
    )
    sections = [
        Section("Quality on the test slice", ("", "float32", "quantized", "difference", "95% interval"), _quality(test)),
        Section("The search", ("", ""), _search(report), plots=[_plot(report)]),
        Section("Tables", ("table", "type", "rows", "dim", "bytes", "times fewer"), _tables(report)),
    ]
    if report["lookups"]:
        sections.insert(1, Section("Lookups", ("", ""), _lookups(report["lookups"])))
    return measured_page("A model in low precision", lead, sections, report["environment"])


def _share(interval: Mapping[str, float]) -> str:
    return (
        f"{_PERCENT * interval['value']:+.4f}% ({_PERCENT * interval['low']:+.4f}% to "
        f"{_PERCENT * interval['high']:+.4f}%)"
    )


def _quality(test: Mapping[str, Any]) -> list[tuple[str, ...]]:
    ne, auc = test["ne_difference"], test["auc_difference"]
    return [
        (
            "normalized entropy",
            f"{test['float32']['ne']:.5f}",
            f"{test['quantized']['ne']:.5f}",
            f"{_PERCENT * ne['value']:+.4f}%",
            f"{_PERCENT * ne['low']:+.4f}% to {_PERCENT * ne['high']:+.4f}%",
        ),
        (
            "AUC",
            f"{test['float32']['auc']:.5f}",
            f"{test['quantized']['auc']:.5f}",
            f"{auc['value']:+.5f}",
            f"{auc['low']:+.5f} to {auc['high']:+.5f}",
        ),
    ]


def _lookups(speed: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [
        ("float32 rows", f"{speed['float32']:,.0f} ids a second"),
        ("chosen types", f"{speed['low_precision']:,.0f} ids a second"),
        ("ratio, median of rounds", f"{speed['ratio']:.2f} ({speed['least']:.2f} to {speed['most']:.2f})"),
    ]


def _search(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    search, calibration = report["search"], report["calibration"]
    rows = [
        ("bound on the relative loss of NE", f"{_PERCENT * report['settings']['bound']:.4f}%"),
        ("evaluations", f"{search['evaluations']:,}"),
        ("changes accepted", f"{search['accepted']:,}"),
        ("it ended because", search["ended"]),
    ]
    if calibration:
        found = {"value": calibration["difference"], "low": calibration["low"], "high": calibration["high"]}
        rows.insert(1, ("on the calibration slice", _share(found)))
    return rows


def _plot(report: Mapping[str, Any]) -> Any:
    names = {"sensitivity": "one table at a time", "search": "search"}
    series = {}
    for step, name in names.items():
        points = sorted((size, ne) for size, ne, at in report["search"]["points"] if at == step)
        if points:
            series[name] = ([size for size, _ in points], [ne for _, ne in points])
    x, y = Axis("bytes of all tables", unit="bytes"), Axis("normalized entropy, calibration slice")
    return curves("Bytes against normalized entropy", series, x, y)


def _tables(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows = []
    for name, table in sorted(report["tables"].items(), key=lambda item: -item[1]["float32_bytes"]):
        fewer = table["float32_bytes"] / table["bytes"] if table["bytes"] else 0.0
        rows.append(
            (
                name,
                table["type"],
                f"{table['rows']:,}",
                str(table["dim"]),
                readable_bytes(table["bytes"]),
                f"{fewer:.2f}",
            )
        )
    return rows


def draw(report: Mapping[str, Any], out: Console) -> None:
    """Print the table of types and the figures."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for table in report["tables"].values():
        kinds.setdefault(table["type"], []).append(table)
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, head in enumerate(("type", "tables", "rows", "float32 bytes", "bytes")):
        drawn.add_column(head, justify="right" if index else "left")
    for kind, members in sorted(kinds.items()):
        drawn.add_row(
            kind,
            str(len(members)),
            f"{sum(t['rows'] for t in members):,}",
            readable_bytes(sum(t["float32_bytes"] for t in members)),
            readable_bytes(sum(t["bytes"] for t in members)),
        )
    out.print(drawn)
    size, test = report["bytes"], report["test"]
    out.print(
        f"tables   {readable_bytes(size['float32'])} -> {readable_bytes(size['quantized'])}, "
        f"{size['ratio']:.2f} times fewer bytes",
        highlight=False,
    )
    out.print(
        f"quality  NE {test['quantized']['ne']:.4f} ({_share(test['ne_difference'])}), "
        f"AUC {test['quantized']['auc']:.4f}, on {test['samples']:,} samples of the test slice",
        highlight=False,
        soft_wrap=True,
    )
    if report["lookups"]:
        speed = report["lookups"]
        out.print(
            f"lookups  {speed['low_precision']:,.0f} ids/s, {speed['ratio']:.2f} of float32 rows "
            f"({speed['least']:.2f} to {speed['most']:.2f})",
            highlight=False,
        )
    out.print(f"search   {report['search']['evaluations']:,} evaluations; {report['search']['ended']}")
