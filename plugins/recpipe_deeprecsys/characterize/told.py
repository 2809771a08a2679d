"""What was measured of steps, against the machine's roofs: the content of characterize.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from recpipe_deeprecsys.characterize.operators import CLASSES, FC, FORWARD, LOOKUP, VIEWS, Timed
from recpipe_deeprecsys.characterize.roofs import CALL, Roofs
from recpipe_deeprecsys.characterize.steps import Stepped

ABOVE = 1.05
"""An operator that is so many times as fast as its roof shows that the limits are wrong."""


def told_steps(size: int, found: Stepped, roofs: Roofs) -> dict[str, Any]:
    """A batch size's steps: each kind of call, the classes, and what lies between."""
    whole = found.between + sum(row.seconds for row in found.rows)
    calls = [row.seconds / row.calls for row in found.rows if row.call.name == VIEWS]
    call = median(calls) if calls else 0.0
    operators = [told_row(row, roofs, whole, call) for row in found.rows]
    return {
        "batch_size": size,
        "step_seconds": found.seconds,
        "steps": found.steps,
        "samples_per_second": size / found.seconds,
        "call_seconds": call,
        "classes": {name: _class(operators, name, whole) for name in CLASSES},
        "between": {"seconds": found.between, "share": found.between / whole},
        "operators": operators,
        "compiled_seconds": None,
        "above": [f"{row['name']} ({row['shape']})" for row in operators if row["of_roof"] > ABOVE],
    }


def told_row(row: Timed, roofs: Roofs, whole: float, call: float) -> dict[str, Any]:
    """A row of operators: all calls of a kind in a step of ``whole`` seconds. ``call``: the seconds of a call
    that does nothing."""
    work = row.work.times(1 / row.calls)
    least, bound = roofs.least(work)
    every = row.work
    return {
        "class": row.call.kind,
        "name": row.call.name,
        "phase": row.call.phase,
        "part": row.call.part,
        "shape": row.call.shape,
        "dtype": every.dtype,
        "calls": row.calls,
        "flops": every.flops,
        "bytes": every.bytes,
        "gathered_bytes": every.gathered,
        "intensity": every.intensity,
        "weights": every.weights,
        "per_weight": _per_weight(row),
        "seconds": row.seconds,
        "share": row.seconds / whole,
        "bound": CALL if least < call else bound,
        "least_seconds": least * row.calls,
        "roof_flops_per_s": work.flops / least if least else None,
        "flops_per_s": every.flops / row.seconds if row.seconds else None,
        "of_roof": least * row.calls / row.seconds if row.seconds else 0.0,
    }


def _per_weight(row: Timed) -> float | None:
    """Operations for each weight: 2 M for a layer of M samples. None where no weights are used."""
    layer = row.call.phase == FORWARD and row.call.kind in (FC, LOOKUP)
    return row.work.flops / row.work.weights if layer and row.work.weights else None


def _class(operators: Sequence[Mapping[str, Any]], name: str, whole: float) -> dict[str, Any]:
    own = [row for row in operators if row["class"] == name]
    keys = ("flops", "bytes", "seconds", "least_seconds")
    found: dict[str, Any] = {key: sum(row[key] for row in own) for key in keys}
    layers = [row for row in own if row["per_weight"] is not None]
    weights = sum(row["weights"] for row in layers)
    found["share"] = found["seconds"] / whole
    found["share_of_operators"] = found["seconds"] / sum(row["seconds"] for row in operators)
    found["intensity"] = found["flops"] / found["bytes"] if found["bytes"] else None
    found["of_roof"] = found["least_seconds"] / found["seconds"] if found["seconds"] else None
    found["per_weight"] = sum(row["flops"] for row in layers) / weights if weights else None
    return found
