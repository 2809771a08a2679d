"""The sizes of a dense optimizer's step, by which its time is predicted."""

from __future__ import annotations

REST = 2.0**25
"""Bytes that the rest of a step touches, at least."""
STATE = {"SGD": 0, "Adagrad": 1, "RMSprop": 1}
"""Values of state for each parameter's value; two for others."""


def optimizer_sizes(name: str, parameters: int, values: int) -> dict[str, float | str]:
    """The sizes of an optimizer's step over so many parameters with ``values`` in all, float32."""
    state = STATE.get(name, 2)
    touched = 4.0 * values * (2 + state)
    moved = 4.0 * values * (3 + 2 * state)
    sizes = {"bytes": moved, "footprint": touched, "elements": float(values), "runs": float(parameters)}
    return {**sizes, "reuse": touched + REST, "dtype": "float32"}
