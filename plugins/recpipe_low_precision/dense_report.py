"""The dense part in the report of a quantization."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Protocol

from recpipe_low_precision.dense import MEASURED, Linear
from recpipe_low_precision.model_quantizer import ReportSection
from recpipe_low_precision.row_types import FLOAT, Choice
from recpipe_low_precision.search import Found

_PERCENT = 100


class Knobs(Protocol):
    """What is shown of the plugin's knobs."""

    dense: str
    layer_error: float
    model_bound: float


def dense_content(layers: Mapping[str, Linear], found: Found, knobs: Knobs) -> dict[str, Any]:
    """The part ``dense`` of report.json, of these ``layers`` and what was ``found`` for them."""
    chosen = found.evaluation
    return {
        "layers": {
            linear.path: _layer(linear, found.assignment[name], knobs.layer_error)
            for name, linear in layers.items()
        },
        "calibration": None
        if chosen is None
        else {k: v for k, v in asdict(chosen).items() if k != "types"} | {"upper": chosen.upper},
        "ended": found.ended,
    }


def _layer(linear: Linear, choice: Choice, bound: float) -> dict[str, Any]:
    own = linear.low.layers.get("int8") if choice.kind == "int8" else None
    return {
        "type": choice.kind,
        "inputs": linear.low.in_features,
        "outputs": linear.low.out_features,
        "errors": linear.errors,
        "range": None if own is None else [own.low, own.high],
        "seconds": linear.seconds,
        "why": "" if choice != FLOAT else _why(linear, bound),
    }


def _why(linear: Linear, bound: float) -> str:
    """Why a layer stays in float32."""
    reasons = []
    for kind, error in linear.errors.items():
        if error > bound:
            reasons.append(f"{kind}: error {_PERCENT * error:.1f}%")
        elif linear.slower(Choice(kind)):
            reasons.append(f"{kind}: {linear.seconds[FLOAT.kind] / linear.seconds[kind]:.2f} of the speed")
        else:
            reasons.append(f"{kind}: the bound on NE")
    return "; ".join(reasons)


def dense_sections(report: Mapping[str, Any]) -> list[ReportSection]:
    """The page's part, if there are layers to show."""
    dense = report["dense"]
    if not dense["layers"]:
        return []
    rows = [_row(path, layer) for path, layer in dense["layers"].items()]
    heads = (
        "linear layer",
        "type",
        "inputs",
        "outputs",
        "error",
        "range of inputs",
        f"times float32's speed, {MEASURED} samples",
        "why float32",
    )
    return [ReportSection("Dense part", heads, rows)]


def _row(path: str, layer: Mapping[str, Any]) -> tuple[str, ...]:
    kind, seconds = layer["type"], layer["seconds"]
    low, high = layer["range"] or (None, None)
    return (
        path,
        kind,
        str(layer["inputs"]),
        str(layer["outputs"]),
        "-" if kind == FLOAT.kind else f"{_PERCENT * layer['errors'][kind]:.2f}%",
        "-" if low is None else f"{low:.3g} to {high:.3g}",
        f"{seconds[FLOAT.kind] / seconds[kind]:.2f}" if seconds else "-",
        layer["why"],
    )


def dense_line(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The terminal's line, if there are layers to show."""
    layers = report["dense"]["layers"]
    if not layers:
        return []
    counts = Counter(layer["type"] for layer in layers.values())
    told = ", ".join(f"{counts[kind]} in {kind}" for kind in ("int8", "bfloat16", FLOAT.kind) if counts[kind])
    lines = [("dense", f"{len(layers)} linear layers: {told}")]
    for path, layer in layers.items():
        if layer["why"]:
            lines.append(("", f"{path} stays in float32 ({layer['why']})"))
    return lines
