"""Makes a run's series of fewer and longer intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SHOWN = ("step", "steps", "samples", "seconds", "samples_per_second", "loss")
"""What a comparison keeps of the ``series`` of report.json."""


def merged(series: Mapping[str, Sequence[Any]], most: int) -> dict[str, list[Any]]:
    """``SHOWN`` of ``series``, with neighbouring intervals made one, so that there are at most ``most``."""
    if not series:
        return {name: [] for name in SHOWN}
    steps = series["steps"]
    width = max(1, -(-len(steps) // most))
    parts = [slice(start, min(start + width, len(steps))) for start in range(0, len(steps), width)]
    ends = {name: [series[name][part][-1] for part in parts] for name in ("step", "samples", "seconds")}
    return {
        **ends,
        "steps": [sum(steps[part]) for part in parts],
        "samples_per_second": [_speed(series["samples_per_second"][part], steps[part]) for part in parts],
        "loss": [_mean(series["loss"][part], steps[part]) for part in parts],
    }


def _mean(values: Sequence[float | None], steps: Sequence[int]) -> float | None:
    known = [(value, count) for value, count in zip(values, steps, strict=True) if value is not None]
    total = sum(count for _, count in known)
    return sum(value * count for value, count in known) / total if total else None


def _speed(values: Sequence[float | None], steps: Sequence[int]) -> float | None:
    """The speed of intervals together, whose steps have equally many samples."""
    pace = _mean([1 / value if value else None for value in values], steps)
    return 1 / pace if pace else None
