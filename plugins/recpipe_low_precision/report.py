"""The report of a quantization: figures, sections of the page, lines on the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from recpipe.kit import readable_bytes
from recpipe_low_precision.debugger import Compared
from recpipe_low_precision.dense import MEASURED, Linear
from recpipe_low_precision.model_quantizer import Quantized, ReportSection
from recpipe_low_precision.row_types import FLOAT, Choice
from recpipe_low_precision.search import Evaluation, Found


def content(
    tables: Mapping[str, Mapping[str, Any]],
    quality: Mapping[str, Any],
    lookups: Mapping[str, Any],
    numerics: Sequence[Compared],
    found: Found,
    evaluations: Sequence[Evaluation],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """report.json's content but for the dense part. ``tables``: type, rows, dim and bytes of each;
    ``quality``: figures of the test slice."""
    before = sum(table["float32_bytes"] for table in tables.values())
    after = sum(table["bytes"] for table in tables.values())
    return {
        "settings": dict(settings),
        "bytes": {"float32": before, "quantized": after, "ratio": before / after},
        "tables": {name: dict(table) for name, table in tables.items()},
        "calibration": _calibration(found),
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


def _calibration(found: Found) -> dict[str, Any] | None:
    """What was measured of the accepted assignment on the calibration slice."""
    if found.evaluation is None:
        return None
    own = asdict(found.evaluation)
    del own["types"]
    return {**own, "upper": found.evaluation.upper}


def dense_content(layers: Mapping[str, Linear], found: Found, bound: float) -> dict[str, Any]:
    """The part ``dense`` of report.json, of these ``layers`` and what was ``found`` for them. ``bound``: on
    the error of each."""
    told = {}
    for name, linear in layers.items():
        choice = found.assignment[name]
        own = linear.low.layers.get("int8") if choice.kind == "int8" else None
        reasons = []
        for kind, error in linear.errors.items() if choice == FLOAT else ():
            if error > bound:
                reasons.append(f"{kind}: error {error:.1%}")
            elif linear.slower(Choice(kind)):
                speed = linear.seconds[FLOAT.kind] / linear.seconds[kind]
                reasons.append(f"{kind}: {speed:.2f} of the speed")
            else:
                reasons.append(f"{kind}: the bound on NE")
        told[linear.path] = {
            "type": choice.kind,
            "inputs": linear.low.in_features,
            "outputs": linear.low.out_features,
            "errors": linear.errors,
            "range": None if own is None else [own.low, own.high],
            "seconds": linear.seconds,
            "why": "; ".join(reasons),
        }
    return {"layers": told, "calibration": _calibration(found), "ended": found.ended}


def written(report: Mapping[str, Any]) -> Quantized:
    """The report for ``recpipe quantize`` to write."""
    size, test = report["bytes"], report["test"]
    changed = ", ".join(
        _difference(own["ne_difference"]) + (f" of {name}" if name else "")
        for name, own in _labels(test).items()
    )
    lead = (
        f"Tables of {readable_bytes(size['float32'])} in {readable_bytes(size['quantized'])}, "
        f"{size['ratio']:.2f} times fewer bytes. On the test slice of {test['samples']:,} samples normalized "
        f"entropy changes by {changed}."
    )
    speed = report["lookups"]
    speeds = [
        ("float32 rows", f"{speed['float32']:,.0f} ids a second"),
        ("chosen types", f"{speed['low_precision']:,.0f} ids a second"),
        ("ratio, median of rounds", _ratio(speed)),
    ]
    lookups = ReportSection("Lookups", ("", ""), speeds)
    sections = [_quality(test), lookups, _search(report), _tables(report)]
    if report["dense"]["layers"]:
        sections.append(_dense(report["dense"]["layers"]))
    return Quantized(report, lead, [*sections, _numerics(report)], _lines(report))


def _labels(test: Mapping[str, Any]) -> Mapping[str, Any]:
    """The figures of each label; of a single one without its name."""
    return test["labels"] or {"": test}


def _difference(interval: Mapping[str, float]) -> str:
    return f"{interval['value']:+.4%} ({interval['low']:+.4%} to {interval['high']:+.4%})"


def _ratio(speed: Mapping[str, float]) -> str:
    return f"{speed['ratio']:.2f} ({speed['least']:.2f} to {speed['most']:.2f})"


def _quality(test: Mapping[str, Any]) -> ReportSection:
    rows = []
    for label, own in _labels(test).items():
        of = f" of {label}" if label else ""
        for name, title, form in (("ne", "normalized entropy", "+.4%"), ("auc", "AUC", "+.5f")):
            each = [f"{own[model][name]:.5f}" for model in ("float32", "quantized")]
            ends = (own[f"{name}_difference"][end] for end in ("value", "low", "high"))
            value, low, high = (format(end, form) for end in ends)
            rows.append((f"{title}{of}", *each, value, f"{low} to {high}"))
    heads = ("", "float32", "quantized", "difference", "95% interval")
    return ReportSection("Quality on the test slice", heads, rows)


def _search(report: Mapping[str, Any]) -> ReportSection:
    search, calibration = report["search"], report["calibration"]
    rows = [
        ("bound on the relative loss of NE", f"{report['settings']['bound']:.4%}"),
        ("evaluations", f"{search['evaluations']:,}"),
        ("changes accepted", f"{search['accepted']:,}"),
        ("it ended because", search["ended"]),
    ]
    if calibration:
        found = {"value": calibration["difference"], "low": calibration["low"], "high": calibration["high"]}
        rows.insert(1, ("on the calibration slice", _difference(found)))
    curves: dict[str, list[tuple[float, float]]] = {}
    for step, name in (("sensitivity", "one table at a time"), ("search", "search")):
        points = sorted((size, ne) for size, ne, at in search["points"] if at == step)
        if points:
            curves[name] = points
    axes = ("bytes of all tables", "NE, calibration slice")
    return ReportSection("Bytes against normalized entropy", ("the search", ""), rows, curves, axes)


def _tables(report: Mapping[str, Any]) -> ReportSection:
    speeds = report["lookups"]["tables"]
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
                _ratio(speeds[name]) if name in speeds else "-",
            )
        )
    heads = ("table", "type", "rows", "dim", "bytes", "times fewer", "lookups over float32")
    return ReportSection("Tables", heads, rows)


def _dense(layers: Mapping[str, Mapping[str, Any]]) -> ReportSection:
    rows = []
    for path, layer in layers.items():
        kind, seconds = layer["type"], layer["seconds"]
        low, high = layer["range"] or (None, None)
        rows.append(
            (
                path,
                kind,
                str(layer["inputs"]),
                str(layer["outputs"]),
                "-" if kind == FLOAT.kind else f"{layer['errors'][kind]:.2%}",
                "-" if low is None else f"{low:.3g} to {high:.3g}",
                f"{seconds[FLOAT.kind] / seconds[kind]:.2f}" if seconds else "-",
                layer["why"],
            )
        )
    speed = f"times float32's speed, {MEASURED} samples"
    heads = ("linear layer", "type", "inputs", "outputs", "error", "range of inputs", speed, "why float32")
    return ReportSection("Dense part", heads, rows)


def _numerics(report: Mapping[str, Any]) -> ReportSection:
    rows = []
    for part in report["numerics"]:
        shares = [part["saturated"], part["range_used"], part["downstream"]]
        said = ["-" if share is None else f"{share:.2%}" for share in shares]
        kind = f"{part['kind']}{', breaks' if part['breaks'] else ''}"
        rows.append((part["name"], kind, f"{part['error']:.2e}", f"{part['snr']:.1f}", *said))
    heads = (
        "table or layer",
        "type",
        "relative error",
        "SNR (dB)",
        "saturated",
        "range used",
        "in the whole",
    )
    return ReportSection("Numerics, the worst first", heads, rows)


def _lines(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The terminal's lines."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for table in report["tables"].values():
        kinds.setdefault(table["type"], []).append(table)
    size, test, speed, search = (report[name] for name in ("bytes", "test", "lookups", "search"))
    lines = [
        (
            kind,
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
        *(
            (
                f"quality of {name}" if name else "quality",
                f"NE {own['quantized']['ne']:.4f}, {_difference(own['ne_difference'])} to float32   "
                f"AUC {own['quantized']['auc']:.4f}   on {test['samples']:,} samples of the test slice",
            )
            for name, own in _labels(test).items()
        ),
        (
            "lookups",
            f"{speed['low_precision']:,.0f} ids/s, {speed['ratio']:.2f} of float32 rows "
            f"({speed['least']:.2f} to {speed['most']:.2f})",
        ),
    ]
    slower = {name: own["ratio"] for name, own in speed["tables"].items() if own["most"] < 1}
    if slower:
        least = min(slower, key=lambda name: slower[name])
        by_time = report["settings"]["minimise"] == "time"
        remedy = "" if by_time else "; plugins.low_precision.minimise=auto keeps faster types"
        more = f", as are {len(slower) - 1} more" if len(slower) > 1 else ""
        said = f"{least} is looked up {slower[least]:.2f} as fast as in float32{more}{remedy}"
        lines.append(("slower", said))
    layers = report["dense"]["layers"]
    if layers:
        counts = Counter(layer["type"] for layer in layers.values())
        told = [f"{counts[kind]} in {kind}" for kind in ("int8", "bfloat16", FLOAT.kind) if counts[kind]]
        lines.append(("dense", f"{len(layers)} linear layers: {', '.join(told)}"))
    lines += [("", f"{path} stays in float32 ({own['why']})") for path, own in layers.items() if own["why"]]
    broken = [part for part in report["numerics"] if part["breaks"]]
    verdict = "no table and no layer has a larger error than its type explains"
    if broken:
        first, more = broken[0], f", and {len(broken) - 1} more (see report.html)" if len(broken) > 1 else ""
        ratio = f"a signal-to-noise ratio of {first['snr']:.1f} dB"
        verdict = f"{first['name']} breaks: {first['kind']} with {ratio}{more}"
    lines.append(("numerics", verdict))
    return [*lines, ("search", f"{search['evaluations']:,} evaluations; {search['ended']}")]
