"""The report of a quantization: figures, sections of the page, lines on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from recpipe.kit import readable_bytes
from recpipe_low_precision.debugger import Compared
from recpipe_low_precision.dense_report import dense_line, dense_sections
from recpipe_low_precision.judge import Evaluation
from recpipe_low_precision.model_quantizer import Quantized, ReportSection
from recpipe_low_precision.search import Found

_PERCENT = 100


def content(
    tables: Mapping[str, Mapping[str, Any]],
    quality: Mapping[str, Any],
    lookups: Mapping[str, Any],
    numerics: Sequence[Compared],
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
        "settings": dict(settings),
        "bytes": {"float32": before, "quantized": after, "ratio": before / after},
        "tables": {name: dict(table) for name, table in tables.items()},
        "calibration": None if chosen is None else _calibration(chosen),
        "test": dict(quality),
        "lookups": lookups,
        "numerics": [{**asdict(part), "breaks": part.breaks} for part in numerics],
        "search": {
            "ended": found.ended,
            "evaluations": len(evaluations),
            "accepted": len(found.accepted),
            "points": [[e.bytes, e.ne, e.step] for e in evaluations],
        },
    }


def _calibration(chosen: Evaluation) -> dict[str, Any]:
    kept = {name: value for name, value in asdict(chosen).items() if name != "types"}
    return {**kept, "upper": chosen.upper}


def written(report: Mapping[str, Any]) -> Quantized:
    """The report for core to write."""
    size, test = report["bytes"], report["test"]
    lead = (
        f"Tables of {readable_bytes(size['float32'])} in {readable_bytes(size['quantized'])}, "
        f"{size['ratio']:.2f} times fewer bytes. On the test slice of {test['samples']:,} samples normalized "
        f"entropy changes by {_share(test['ne_difference'])}."
    )
    heads = ("", "float32", "quantized", "difference", "95% interval")
    sections = [
        ReportSection("Quality on the test slice", heads, _quality(test)),
        ReportSection(
            "Bytes against normalized entropy",
            ("the search", ""),
            _search(report),
            _points(report),
            ("bytes of all tables", "NE, calibration slice"),
        ),
        ReportSection("Tables", _TABLES, _tables(report)),
    ]
    sections += dense_sections(report)
    sections.append(ReportSection("Numerics, the worst first", _NUMERICS, _numerics(report)))
    sections.insert(1, ReportSection("Lookups", ("", ""), _lookups(report["lookups"])))
    return Quantized(report, lead, sections, _lines(report))


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
    rows: list[tuple[str, ...]] = [
        ("bound on the relative loss of NE", f"{_PERCENT * report['settings']['bound']:.4f}%"),
        ("evaluations", f"{search['evaluations']:,}"),
        ("changes accepted", f"{search['accepted']:,}"),
        ("it ended because", search["ended"]),
    ]
    if calibration:
        found = {"value": calibration["difference"], "low": calibration["low"], "high": calibration["high"]}
        rows.insert(1, ("on the calibration slice", _share(found)))
    return rows


def _points(report: Mapping[str, Any]) -> dict[str, list[tuple[float, float]]]:
    names = {"sensitivity": "one table at a time", "search": "search"}
    found: dict[str, list[tuple[float, float]]] = {}
    for step, name in names.items():
        points = sorted((size, ne) for size, ne, at in report["search"]["points"] if at == step)
        if points:
            found[name] = points
    return found


_NUMERICS = (
    "table or layer",
    "type",
    "relative error",
    "SNR (dB)",
    "saturated",
    "range used",
    "in the whole",
)


def _numerics(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for part in report["numerics"]:
        shares = [part["saturated"], part["range_used"], part["downstream"]]
        said = ["-" if share is None else f"{_PERCENT * share:.2f}%" for share in shares]
        broken = ", breaks" if part["breaks"] else ""
        rows.append(
            (part["name"], f"{part['kind']}{broken}", f"{part['error']:.2e}", f"{part['snr']:.1f}", *said)
        )
    return rows


def _verdict(report: Mapping[str, Any]) -> str:
    broken = [part for part in report["numerics"] if part["breaks"]]
    if not broken:
        return "no table and no layer has a larger error than its type explains"
    first = broken[0]
    more = f", and {len(broken) - 1} more (see report.html)" if len(broken) > 1 else ""
    return (
        f"{first['name']} breaks: {first['kind']} with a signal-to-noise ratio of {first['snr']:.1f} dB{more}"
    )


_TABLES = ("table", "type", "rows", "dim", "bytes", "times fewer", "lookups over float32")


def _tables(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    speeds = report["lookups"]["tables"]
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
                _speed(speeds[name]) if name in speeds else "-",
            )
        )
    return rows


def _speed(speed: Mapping[str, float]) -> str:
    return f"{speed['ratio']:.2f} ({speed['least']:.2f} to {speed['most']:.2f})"


def _slower(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The tables whose lookups have become slower, if any have."""
    slower = {name: own["ratio"] for name, own in report["lookups"]["tables"].items() if own["most"] < 1}
    if not slower:
        return []
    least = min(slower, key=lambda name: slower[name])
    remedy = (
        ""
        if report["settings"]["minimise"] == "time"
        else "; plugins.low_precision.minimise=auto keeps faster types"
    )
    more = f", as are {len(slower) - 1} more" if len(slower) > 1 else ""
    return [("slower", f"{least} is looked up {slower[least]:.2f} as fast as in float32{more}{remedy}")]


def _lines(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The terminal's lines."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for table in report["tables"].values():
        kinds.setdefault(table["type"], []).append(table)
    size, test = report["bytes"], report["test"]
    lines = [
        (
            f"{kind}",
            f"{len(members)} tables, {sum(t['rows'] for t in members):,} rows, "
            f"{readable_bytes(sum(t['float32_bytes'] for t in members))} -> "
            f"{readable_bytes(sum(t['bytes'] for t in members))}",
        )
        for kind, members in sorted(kinds.items())
    ]
    lines += [
        (
            "tables",
            f"{readable_bytes(size['float32'])} -> {readable_bytes(size['quantized'])}, "
            f"{size['ratio']:.2f} times fewer bytes",
        ),
        (
            "quality",
            f"NE {test['quantized']['ne']:.4f}, {_share(test['ne_difference'])} to float32   "
            f"AUC {test['quantized']['auc']:.4f}   on {test['samples']:,} samples of the test slice",
        ),
    ]
    speed = report["lookups"]
    lines.append(
        (
            "lookups",
            f"{speed['low_precision']:,.0f} ids/s, {speed['ratio']:.2f} of float32 rows "
            f"({speed['least']:.2f} to {speed['most']:.2f})",
        )
    )
    lines += _slower(report)
    lines += dense_line(report)
    lines.append(("numerics", _verdict(report)))
    search = report["search"]
    lines.append(("search", f"{search['evaluations']:,} evaluations; {search['ended']}"))
    return lines
